#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

// y = weight * x / sqrt(mean(x^2) + eps) for every row, in fp32; the quotient is rounded to the
// dtype before it is multiplied, as models do it. A row's bits depend on that row alone.
struct RmsNormParams {
  const void* x;  // [rows, x_stride], unit stride within a row
  int64_t x_stride;
  const void* weight;  // [dim]
  void* y;             // [rows, dim]
  int64_t rows;
  int64_t dim;
  float eps;
  DType dtype;
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(rms_norm, RmsNormParams)
