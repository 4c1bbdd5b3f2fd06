// Masses: probabilities in fixed point, so that sums do not depend on their order.
#pragma once

#include "common/numerics.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Below this the mass of exp(value) rounds to 0 for every vocabulary.
constexpr float kNegligible = -29.0f;

// 40 bits, fewer where the sum of a huge vocabulary could overflow.
SPECDEC_INLINE int mass_bits(int64_t vocab) {
  int bits = 0;
  while (bits < 62 && (vocab - 1) >> bits != 0) ++bits;
  return 62 - bits < 40 ? 62 - bits : 40;
}

SPECDEC_INLINE float power_of_two(int exponent) {
  return bit_cast<float>(uint32_t(exponent + 127) << 23);
}

// Rounds to nearest even: adding 2^52 leaves the integer in the low bits of the double.
SPECDEC_INLINE int64_t to_mass(float probability, float scale) {
#if defined(SPECDEC_DEVICE)
  return __float2ll_rn(probability * scale);  // GPUs are slow at doubles
#else
  return bit_cast<int64_t>(double(probability * scale) + 0x1p52) - 0x4330000000000000;
#endif
}

SPECDEC_INLINE float mass_as_float(int64_t mass, int bits) {
  return float(double(mass) * double(power_of_two(-bits)));
}

#if !defined(SPECDEC_DEVICE)
// The to_mass() of kLanes probabilities times their scale, each kExcess too large. Two registers,
// as compilers keep a vector of kLanes 64-bit integers in memory.
struct Masses {
  PairU64 low, high;

  SPECDEC_INLINE explicit Masses(F32 scaled) {
    const Halves halves = bit_cast<Halves>(scaled);
    low = rounded(halves.low);
    high = rounded(halves.high);
  }

#if defined(__AVX512DQ__) && defined(SPECDEC_ISA_avx512)
  static constexpr uint64_t kExcess = 0;
#else
  static constexpr uint64_t kExcess = 0x4330000000000000;
#endif

 private:
  typedef float HalfF32 __attribute__((vector_size(kLanes * 2)));
  typedef double HalfF64 __attribute__((vector_size(kLanes * 4)));
  struct Halves {
    HalfF32 low, high;
  };

#if defined(__AVX512DQ__) && defined(SPECDEC_ISA_avx512)
  static SPECDEC_INLINE PairU64 rounded(HalfF32 scaled) {
    return (PairU64)_mm512_maskz_cvtps_epi64(0xff, (__m256)scaled);
  }
#else
  static SPECDEC_INLINE PairU64 rounded(HalfF32 scaled) {
    return bit_cast<PairU64>(__builtin_convertvector(scaled, HalfF64) + 0x1p52);
  }
#endif
};

// Adds up masses: sums are modulo 2^64, so that the excess can be taken off at the end.
class MassSum {
 public:
  SPECDEC_INLINE void add(F32 scaled) {
    const Masses masses(scaled);
    low_ += masses.low;
    high_ += masses.high;
    count_ += kLanes;
  }
  int64_t total() const {
    uint64_t total = 0 - uint64_t(count_) * Masses::kExcess;
    for (int lane = 0; lane < kLanes / 2; ++lane) total += low_[lane] + high_[lane];
    return int64_t(total);
  }

 private:
  PairU64 low_ = {}, high_ = {};
  int64_t count_ = 0;
};

// Sums weights(first) over the vocabulary, kLanes at a time.
template <class Weights>
SPECDEC_INLINE int64_t sum_of_masses(int64_t vocab, Weights weights) {
  const float scale = power_of_two(mass_bits(vocab));
  MassSum sum;
  for (int64_t first = 0; first < vocab; first += kLanes) sum.add(weights(first) * scale);
  return sum.total();
}
#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
