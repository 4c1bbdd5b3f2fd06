// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", 2011). Key: a 64-bit seed. Counter words: position (low, high), stream, index / 4; the
// index picks one of the four words. specdec_kernels/ops/_random.py draws the same bits.
#pragma once

#include "common/numerics.h"
#include "common/sampling.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// The largest value that gumbel() returns is a little smaller.
constexpr float kLargestGumbel = 22.9f;

struct Noise {
  uint32_t key[2];
  uint32_t position[2];
  uint32_t stream;

  SPECDEC_INLINE Noise(int64_t seed, int64_t at, uint32_t stream_id)
      : key{uint32_t(seed), uint32_t(uint64_t(seed) >> 32)},
        position{uint32_t(at), uint32_t(uint64_t(at) >> 32)},
        stream(stream_id) {}
};

SPECDEC_INLINE void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = uint64_t(a) * b;
  high = uint32_t(product >> 32);
  low = uint32_t(product);
}

// The four words of U::lanes counters, one block index per lane.
template <class U>
SPECDEC_INLINE void philox(const Noise& noise, U block, U words[4]) {
  uint32_t k0 = noise.key[0], k1 = noise.key[1];
  U c0 = noise.position[0] - U{}, c1 = noise.position[1] - U{}, c2 = noise.stream - U{}, c3 = block;
  SPECDEC_UNROLL(10)
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high1, low1;
    multiply_wide(c0, 0xD2511F53u, high0, low0);
    multiply_wide(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// (w + 0.5) 2^-32 in fp32, at most 1 - 2^-24: never 0, never 1. A word is converted in two exact
// halves whose sum rounds once.
template <class F>
SPECDEC_INLINE F to_uniform(typename Lanes<F>::Uint word) {
  using I = typename Lanes<F>::Int;
  const F high = Lanes<F>::to_float(bit_cast<I>(word >> 16));
  const F low = Lanes<F>::to_float(bit_cast<I>(word & 0xffffu));
  const F u = (high * 65536.0f + low + 0.5f) * 0x1p-32f;
  return u > 0x1.fffffep-1f ? splat<F>(0x1.fffffep-1f) : u;
}

// fp32 resolves u near 0, where the large values come from.
template <class F>
SPECDEC_INLINE F gumbel(F u) {
  return -log_(-log1p_(-u));
}

SPECDEC_INLINE float coin(const Noise& noise, uint32_t index) {
  uint32_t words[4];
  philox<uint32_t>(noise, index / 4, words);
  return to_uniform<float>(words[index % 4]);
}

#if !defined(SPECDEC_DEVICE)
// The words of 4 kLanes consecutive indices from `first` on, which is a multiple of 4 kLanes.
SPECDEC_INLINE void consecutive_words(const Noise& noise, int64_t first, U32 words[4]) {
  U32 block;
  for (int lane = 0; lane < kLanes; ++lane) block[lane] = uint32_t(first / 4) + lane;
  U32 w[4];
  philox<U32>(noise, block, w);
  // Transpose: lane l of word j belongs to index 4 l + j.
  const U32 even_low = interleave_low(w[0], w[2]), even_high = interleave_high(w[0], w[2]);
  const U32 odd_low = interleave_low(w[1], w[3]), odd_high = interleave_high(w[1], w[3]);
  words[0] = interleave_low(even_low, odd_low);
  words[1] = interleave_high(even_low, odd_low);
  words[2] = interleave_low(even_high, odd_high);
  words[3] = interleave_high(even_high, odd_high);
}
#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
