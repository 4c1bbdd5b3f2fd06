// What the machine can do at most: the roofs that benchmarks hold the kernels against.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/status.h"

namespace specdec {

// Reads once, each thread a contiguous part of whole 4 KiB pages; what is left over is not read.
struct ReadProbeParams {
  const void* data;
  int64_t bytes;
  uint32_t* sum;  // of the words read, so that the reads cannot be left out
  int num_threads;
};

enum class Arithmetic : int { fp32_fma = 0, bf16_dot = 1, bf16_tiles = 2 };

// Multiplies and adds in registers, many independent chains at once.
struct ComputeProbeParams {
  Arithmetic arithmetic;
  int64_t rounds;
  double* flops;  // of all threads; 0 when the instruction set lacks it
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP_BF16(read_probe, ReadProbeParams)
SPECDEC_CPU_OP_BF16(compute_probe, ComputeProbeParams)
