#include "sample/sample.h"

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {

Status sample(const SampleParams&) { return Status::ok; }

}  // namespace SPECDEC_ISA
}  // namespace specdec
