#include "rejection_sample/rejection_sample.h"

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {

Status rejection_sample(const RejectionSampleParams&) { return Status::ok; }

}  // namespace SPECDEC_ISA
}  // namespace specdec
