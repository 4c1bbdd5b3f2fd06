// The one switch over element types: kernels are templates of the type that they read.
#pragma once

#include "common/params.h"
#include "common/status.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// run(element), element a value of the type that dtype names.
template <class Run>
inline Status with_element(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32:
      return run(float());
    case DType::bf16:
      return run(BFloat16());
    case DType::f16:
      return run(Half());
    default:
      return Status::unsupported_dtype;
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
