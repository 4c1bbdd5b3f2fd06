#include "probe/probe.h"

#include "common/vec.h"

#if defined(SPECDEC_ISA_avx512) && defined(__AVX512F__)
#include <cpuid.h>
#define SPECDEC_PROBE_BF16 1
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define SPECDEC_PROBE_TILES 1
#endif
#endif

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// ---- memory

// Several streams keep more pages open than one, which the hardware prefetchers reward.
constexpr int kStreams = 4;
constexpr int kVectors = 2;  // of each stream in turn
constexpr int64_t kPage = 4096;

uint32_t read_all(const char* data, int64_t bytes) {
  constexpr int64_t kStep = kVectors * int64_t(sizeof(I32));
  const int64_t part = bytes / kStreams;
  U32 sums[kStreams * kVectors] = {};
  for (int64_t at = 0; at + kStep <= part; at += kStep) {
    for (int i = 0; i < kStreams * kVectors; ++i) {
      const char* stream = data + i / kVectors * part + at;
      sums[i] += (U32)((const I32Unaligned*)stream)[i % kVectors];
    }
  }
  U32 total = {};
  for (int i = 0; i < kStreams * kVectors; ++i) total += sums[i];
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result += total[lane];
  return result;
}

// ---- arithmetic: each returns the flops of one thread

constexpr int kChains = 12;  // latency times throughput, and they fit 16 registers

volatile float kept;  // results go here, so that the arithmetic cannot be left out

double fp32_fma(int64_t rounds) {
  const F32 factor = broadcast(kept * 0.0f + 0.5f), addend = broadcast(0.25f);
  F32 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = broadcast(float(i));
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], factor, addend);
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  kept = sums[0][0];
  return 2.0 * kChains * kLanes * double(rounds);
}

#if defined(SPECDEC_PROBE_BF16)
bool has_bf16_dot() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

__attribute__((target("avx512f,avx512bf16"))) double bf16_dot(int64_t rounds) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  const __m512bh halves = (__m512bh)_mm512_set1_epi32(0x3f003f00);
  __m512 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(kept * 0.0f + float(i));
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], ones, halves);
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  kept = ((F32)sums[0])[0];
  return 4.0 * kChains * 16 * double(rounds);
}
#endif

#if defined(SPECDEC_PROBE_TILES)
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool in_cpu =
      __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);  // bf16, tile
  // Linux hands out the tile registers on request only: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  return in_cpu && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

__attribute__((noinline, target("amx-tile,amx-bf16"))) double bf16_tiles(int64_t rounds) {
  const TileConfig config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * double(rounds);
}
#endif

typedef double (*Compute)(int64_t rounds);

// nullptr when the CPU, the system or the build lacks it.
Compute find(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::fp32_fma:
      return fp32_fma;
    case Arithmetic::bf16_dot:
#if defined(SPECDEC_PROBE_BF16)
      if (has_bf16_dot()) return bf16_dot;
#endif
      return nullptr;
    case Arithmetic::bf16_tiles:
#if defined(SPECDEC_PROBE_TILES)
      if (has_tiles()) return bf16_tiles;
#endif
      return nullptr;
  }
  return nullptr;
}

}  // namespace

Status read_probe(const ReadProbeParams& p) {
  const int64_t part = p.bytes / p.num_threads / kPage * kPage;
  uint32_t sum = 0;
#pragma omp parallel for num_threads(p.num_threads) schedule(static) reduction(+ : sum)
  for (int i = 0; i < p.num_threads; ++i)
    sum += read_all(static_cast<const char*>(p.data) + i * part, part);
  *p.sum = sum;
  return Status::ok;
}

Status compute_probe(const ComputeProbeParams& p) {
  const Compute compute = find(p.arithmetic);
  double flops = 0.0;
  if (compute != nullptr) {
#pragma omp parallel for num_threads(p.num_threads) schedule(static) reduction(+ : flops)
    for (int i = 0; i < p.num_threads; ++i) flops += compute(p.rounds);
  }
  *p.flops = flops;
  return Status::ok;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
