// Which instruction set the CPU kernels run with, chosen once per process.
#pragma once

#include "common/status.h"

namespace specdec {

enum class Isa { baseline = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this machine, or the one that SPECDEC_CPU_ISA names.
Isa active_isa();
const char* isa_name(Isa isa);
// True when SPECDEC_CPU_ISA names an instruction set that this machine or build lacks.
bool isa_request_refused();

}  // namespace specdec

// Declares the per-ISA builds of a kernel and the function NAME_cpu that calls the active one.
#if defined(__x86_64__)
#define SPECDEC_CPU_OP(NAME, PARAMS)               \
  namespace specdec {                              \
  namespace baseline {                             \
  Status NAME(const PARAMS& params);               \
  }                                                \
  namespace avx2 {                                 \
  Status NAME(const PARAMS& params);               \
  }                                                \
  namespace avx512 {                               \
  Status NAME(const PARAMS& params);               \
  }                                                \
  inline Status NAME##_cpu(const PARAMS& params) { \
    switch (active_isa()) {                        \
      case Isa::avx512:                            \
        return avx512::NAME(params);               \
      case Isa::avx2:                              \
        return avx2::NAME(params);                 \
      default:                                     \
        return baseline::NAME(params);             \
    }                                              \
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
#endif
