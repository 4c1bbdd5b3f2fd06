// Which instruction set the CPU kernels run with, chosen once per process.
#pragma once

#include "common/status.h"

namespace specdec {

// Each includes the ones before it. avx512_bf16 has dot products of bf16 pairs, amx has matrix
// tiles.
enum class Isa { baseline = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };

// The best instruction set of this machine, or the one that SPECDEC_CPU_ISA names.
Isa active_isa();
const char* isa_name(Isa isa);
// True when SPECDEC_CPU_ISA names an instruction set that this machine or build lacks.
bool isa_request_refused();

}  // namespace specdec

// Declares the per-ISA builds of a kernel and the function NAME_cpu that calls the active one.
// SPECDEC_CPU_OP_BF16 is for kernels that have builds for the bf16 instruction sets too
// (CMakeLists.txt, BF16_OPS); the others run their avx512 build there.
#if defined(__x86_64__)
#define SPECDEC_CPU_BUILD(ISA, NAME, PARAMS) \
  namespace ISA {                            \
  Status NAME(const PARAMS& params);         \
  }
#define SPECDEC_CPU_OP(NAME, PARAMS)               \
  namespace specdec {                              \
  SPECDEC_CPU_BUILD(baseline, NAME, PARAMS)        \
  SPECDEC_CPU_BUILD(avx2, NAME, PARAMS)            \
  SPECDEC_CPU_BUILD(avx512, NAME, PARAMS)          \
  inline Status NAME##_cpu(const PARAMS& params) { \
    switch (active_isa()) {                        \
      case Isa::baseline:                          \
        return baseline::NAME(params);             \
      case Isa::avx2:                              \
        return avx2::NAME(params);                 \
      default:                                     \
        return avx512::NAME(params);               \
    }                                              \
  }                                                \
  }
#define SPECDEC_CPU_OP_BF16(NAME, PARAMS)          \
  namespace specdec {                              \
  SPECDEC_CPU_BUILD(baseline, NAME, PARAMS)        \
  SPECDEC_CPU_BUILD(avx2, NAME, PARAMS)            \
  SPECDEC_CPU_BUILD(avx512, NAME, PARAMS)          \
  SPECDEC_CPU_BUILD(avx512_bf16, NAME, PARAMS)     \
  SPECDEC_CPU_BUILD(amx, NAME, PARAMS)             \
  inline Status NAME##_cpu(const PARAMS& params) { \
    switch (active_isa()) {                        \
      case Isa::baseline:                          \
        return baseline::NAME(params);             \
      case Isa::avx2:                              \
        return avx2::NAME(params);                 \
      case Isa::avx512:                            \
        return avx512::NAME(params);               \
      case Isa::avx512_bf16:                       \
        return avx512_bf16::NAME(params);          \
      case Isa::amx:                               \
        return amx::NAME(params);                  \
    }                                              \
    return baseline::NAME(params);                 \
  }                                                \
  }
#else
#define SPECDEC_CPU_OP(NAME, PARAMS)                                                \
  namespace specdec {                                                               \
  namespace baseline {                                                              \
  Status NAME(const PARAMS& params);                                                \
  }                                                                                 \
  inline Status NAME##_cpu(const PARAMS& params) { return baseline::NAME(params); } \
  }
#define SPECDEC_CPU_OP_BF16 SPECDEC_CPU_OP
#endif
