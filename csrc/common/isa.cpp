#include "common/isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace specdec {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

#if !defined(SPECDEC_EMULATE)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_bf16_dot() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

bool has_tiles() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool in_cpu =
      __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);  // bf16, tile
  // Linux hands out the tile registers on request only: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  return in_cpu && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif
#endif

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!has_avx2()) return Isa::baseline;
#if defined(SPECDEC_EMULATE)
  return Isa::amx;
#else
  if (!has_avx512()) return Isa::avx2;
  if (!has_bf16_dot()) return Isa::avx512;
  return has_tiles() ? Isa::amx : Isa::avx512_bf16;
#endif
#else
  return Isa::baseline;
#endif
}

struct Choice {
  Isa isa = detect();
  bool refused = false;

  Choice() {
    const char* wanted = std::getenv("SPECDEC_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return;
    for (Isa candidate : {Isa::baseline, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx}) {
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
    case Isa::amx:
      return "amx";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::baseline:
      break;
  }
  return "baseline";
}

}  // namespace specdec
