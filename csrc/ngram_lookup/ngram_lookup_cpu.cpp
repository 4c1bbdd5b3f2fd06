#include "ngram_lookup/ngram_lookup.h"

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {

Status ngram_lookup(const NgramLookupParams&) { return Status::ok; }

}  // namespace SPECDEC_ISA
}  // namespace specdec
