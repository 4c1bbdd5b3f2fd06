#include "tree_attention/tree_attention.h"

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {

Status tree_attention(const TreeAttentionParams&) { return Status::ok; }

}  // namespace SPECDEC_ISA
}  // namespace specdec
