#include "linear_small_m/linear_small_m.h"

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {

Status linear_small_m(const LinearSmallMParams&) { return Status::ok; }

}  // namespace SPECDEC_ISA
}  // namespace specdec
