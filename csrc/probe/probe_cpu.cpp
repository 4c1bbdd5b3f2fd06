#include "probe/probe.h"

#include "common/amx.h"
#include "common/bf16_dot.h"

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

double bf16_dot(int64_t rounds) {
  const U32 ones = U32{} + 0x3f803f80u, halves = U32{} + 0x3f003f00u;
  F32 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = broadcast(kept * 0.0f + float(i));
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < kChains; ++i) sums[i] = dot_pairs(sums[i], ones, halves);
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  kept = sums[0][0];
  return 4.0 * kChains * kLanes * double(rounds);
}

double bf16_tiles(int64_t rounds) {
  const TileScope tiles;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  tile_zero<4>();
  tile_zero<5>();
  tile_zero<6>();
  tile_zero<7>();
  for (int64_t round = 0; round < rounds; ++round) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  return 4.0 * 2 * kTileSide * kTileSide * kTileDepth * double(rounds);
}

typedef double (*Compute)(int64_t rounds);

// nullptr when the instruction set lacks it.
Compute find(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::fp32_fma:
      return fp32_fma;
    case Arithmetic::bf16_dot:
      return kHasPairDots ? bf16_dot : nullptr;
    case Arithmetic::bf16_tiles:
      return kHasTiles ? bf16_tiles : nullptr;
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
