#include "common/isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace specdec {
namespace {

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
#if defined(SPECDEC_EMULATE_AVX512)
  const bool has_avx512 = has_avx2;
#else
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  if (has_avx512) return Isa::avx512;
  if (has_avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

struct Choice {
  Isa isa = detect();
  bool refused = false;

  Choice() {
    const char* wanted = std::getenv("SPECDEC_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return;
    for (Isa candidate : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (std::strcmp(wanted, isa_name(candidate)) == 0 && candidate <= isa) {
        isa = candidate;
        return;
      }
    }
    refused = true;
  }
};

const Choice& choice() {
  static const Choice value;
  return value;
}

}  // namespace

Isa active_isa() { return choice().isa; }

bool isa_request_refused() { return choice().refused; }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace specdec
