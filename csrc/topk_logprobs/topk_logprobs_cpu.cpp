#include "topk_logprobs/topk_logprobs.h"

#include "common/decide.h"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// The first pass leaves the maximum of every block of the row. The k-th largest of them is at most
// the k-th best logit, so that only blocks which reach it, about k of them, are searched.
constexpr int64_t kBlockSize = 256;

inline int64_t num_blocks(int64_t size) { return (size + kBlockSize - 1) / kBlockSize; }

template <class T>
void block_maxima(const T* row, int64_t begin, int64_t end, float* maxima) {
  for (int64_t start = begin; start < end; start += kBlockSize) {
    const int64_t stop = start + kBlockSize < end ? start + kBlockSize : end;
    F32 largest[4];
    for (F32& each : largest) each = broadcast(-kInfinity);
    if (stop - start == kBlockSize) {
      for (int64_t i = start; i < stop; i += 4 * kLanes)
        for (int j = 0; j < 4; ++j) largest[j] = vmax(load(row + i + j * kLanes), largest[j]);
    } else {
      for (int64_t i = start; i < stop; i += kLanes)
        largest[0] = vmax(load_upto(row + i, stop - i), largest[0]);
    }
    maxima[start / kBlockSize] =
        reduce_max(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
  }
}

// The best keys of the row, sorted; NaN and -infinity are never among them.
template <class T>
void select_best(const T* row, int64_t size, const float* maxima, TopKeys& best, TopKeys blocks) {
  for (int64_t block = 0; block < num_blocks(size); ++block)
    blocks.offer(to_key(maxima[block], block));
  // The smallest value that may still enter; of equal ones the first stays.
  float lowest = blocks.full() ? key_value(blocks.worst()) : -kInfinity;
  for (int64_t block = 0; block < num_blocks(size); ++block) {
    if (!(maxima[block] >= lowest)) continue;
    const int64_t begin = block * kBlockSize;
    const int64_t end = begin + kBlockSize < size ? begin + kBlockSize : size;
    for (int64_t first = begin; first < end; first += kLanes) {
      const F32 values = load_upto(row + first, end - first);
      if (!any(values >= lowest)) continue;
      for (int lane = 0; lane < kLanes; ++lane)
        if (values[lane] >= lowest && values[lane] > -kInfinity)
          best.offer(to_key(values[lane], first + lane));
      if (best.full() && key_value(best.worst()) > lowest) lowest = key_value(best.worst());
    }
  }
  best.sort();
}

// Adds up masses, each the to_mass() of its float.
class MassSum {
 public:
  SPECDEC_INLINE void add(F32 scaled) {
    const Halves halves = bit_cast<Halves>(scaled);
    low_ += rounded(halves.low);
    high_ += rounded(halves.high);
    count_ += kLanes;
  }
  int64_t total() const {
    uint64_t total = 0 - uint64_t(count_) * kExcess;
    for (int lane = 0; lane < kLanes / 2; ++lane) total += low_[lane] + high_[lane];
    return int64_t(total);
  }

 private:
  // Two registers, as compilers keep a vector of kLanes 64-bit integers in memory.
  typedef float HalfF32 __attribute__((vector_size(kLanes * 2)));
  typedef double HalfF64 __attribute__((vector_size(kLanes * 4)));
  struct Halves {
    HalfF32 low, high;
  };

  // To nearest even, and kExcess more: sums are modulo 2^64, so it can be taken off at the end.
#if defined(__AVX512DQ__) && defined(SPECDEC_ISA_avx512)
  static constexpr uint64_t kExcess = 0;
  static SPECDEC_INLINE PairU64 rounded(HalfF32 scaled) {
    return (PairU64)_mm512_maskz_cvtps_epi64(0xff, (__m256)scaled);
  }
#else
  static constexpr uint64_t kExcess = 0x4330000000000000;
  static SPECDEC_INLINE PairU64 rounded(HalfF32 scaled) {
    return bit_cast<PairU64>(__builtin_convertvector(scaled, HalfF64) + 0x1p52);
  }
#endif

  PairU64 low_ = {}, high_ = {};
  int64_t count_ = 0;
};

// exp(logit - largest) summed in fixed point; begin is a multiple of kBlockSize.
template <class T>
int64_t sum_exponentials(const T* row, int64_t begin, int64_t end, const float* maxima,
                         float largest, int bits) {
  const float scale = power_of_two(bits);
  MassSum sum;
  const auto add = [&](F32 logits) __attribute__((always_inline)) {
    const F32 values = logits - largest;
    sum.add(select(values > kNegligible, exp_in_range(values) * scale, F32{}));
  };
  for (int64_t start = begin; start < end; start += kBlockSize) {
    if (!(maxima[start / kBlockSize] - largest > kNegligible)) continue;
    if (end - start >= kBlockSize) {
      for (int64_t i = start; i < start + kBlockSize; i += kLanes) add(load(row + i));
    } else {
      for (int64_t i = start; i < end; i += kLanes) add(load_upto(row + i, end - i));
    }
  }
  return sum.total();
}

// The same where the largest is +infinity: each one counts as exp(0).
template <class T>
int64_t sum_infinities(const T* row, int64_t begin, int64_t end, int bits) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) count += to_float(row[i]) == kInfinity;
  return count << bits;
}

void write_row(const TopkLogprobsParams& p, int64_t r, const TopKeys& best, int64_t mass) {
  const float largest = best.size() > 0 ? key_value(best[0]) : -kInfinity;
  const float log_sum = best.size() > 0 ? log_(mass_as_float(mass, mass_bits(p.vocab))) : 0.0f;
  p.lse[r] = largest + log_sum;
  for (int64_t i = 0; i < p.k; ++i) {
    float logprob = -kInfinity;
    if (i < best.size()) {
      const float logit = key_value(best[i]);
      logprob = (largest < kInfinity ? logit - largest : logit == largest ? 0.0f : -kInfinity);
      logprob = logprob - log_sum;
    }
    p.logprobs[r * p.k + i] = logprob;
    p.token_ids[r * p.k + i] = logprob > -kInfinity ? key_index(best[i]) : -1;
  }
}

// Memory of one row in progress.
struct Workspace {
  uint64_t *best, *blocks;
  int64_t* masses;
  float* maxima;
  int64_t capacity;

  bool allocate(const TopkLogprobsParams& p, int64_t chunks) {
    capacity = p.k < p.vocab ? p.k : p.vocab;
    const size_t words = size_t(2 * capacity + chunks);
    void* memory = thread_scratch(
        kDecideScratch, words * sizeof(uint64_t) + size_t(num_blocks(p.vocab)) * sizeof(float));
    best = static_cast<uint64_t*>(memory);
    blocks = best + capacity;
    masses = reinterpret_cast<int64_t*>(blocks + capacity);
    maxima = reinterpret_cast<float*>(masses + chunks);
    return memory != nullptr;
  }
};

// One row, cut into `chunks` pieces of `size` logits for as many threads.
template <class T>
bool decide_row(const TopkLogprobsParams& p, int64_t r, int64_t chunks, int64_t size) {
  Workspace work;
  if (!work.allocate(p, chunks)) return false;
  const T* row = static_cast<const T*>(p.logits) + r * p.stride;
#pragma omp parallel for num_threads(int(chunks)) schedule(static) if (chunks > 1)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t end = (c + 1) * size < p.vocab ? (c + 1) * size : p.vocab;
    block_maxima(row, c * size, end, work.maxima);
  }
  TopKeys best(work.best, work.capacity);
  select_best(row, p.vocab, work.maxima, best, TopKeys(work.blocks, work.capacity));
  const float largest = best.size() > 0 ? key_value(best[0]) : -kInfinity;
  const int bits = mass_bits(p.vocab);
#pragma omp parallel for num_threads(int(chunks)) schedule(static) if (chunks > 1)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t end = (c + 1) * size < p.vocab ? (c + 1) * size : p.vocab;
    work.masses[c] = largest == kInfinity
                         ? sum_infinities(row, c * size, end, bits)
                         : sum_exponentials(row, c * size, end, work.maxima, largest, bits);
  }
  for (int64_t c = 1; c < chunks; ++c) work.masses[0] += work.masses[c];
  write_row(p, r, best, work.masses[0]);
  return true;
}

template <class T>
Status run(const TopkLogprobsParams& p) {
  if (p.vocab >> 32 != 0) return Status::unsupported_shape;
  int failed = 0;
  if (p.rows < p.num_threads && p.vocab > kSmallestParallel) {
    const Chunks chunks(1, p.vocab, p.num_threads);
    const int64_t size = num_blocks(chunks.size) * kBlockSize;
    for (int64_t r = 0; r < p.rows; ++r)
      failed += !decide_row<T>(p, r, (p.vocab + size - 1) / size, size);
  } else {
#pragma omp parallel for num_threads(p.num_threads)                           \
    schedule(dynamic) if (p.rows > 1 && p.rows * p.vocab > kSmallestParallel) \
    reduction(+ : failed)
    for (int64_t r = 0; r < p.rows; ++r) failed += !decide_row<T>(p, r, 1, p.vocab);
  }
  return failed ? Status::out_of_memory : Status::ok;
}

}  // namespace

Status topk_logprobs(const TopkLogprobsParams& p) {
  switch (p.dtype) {
    case DType::f32:
      return run<float>(p);
    case DType::bf16:
      return run<BFloat16>(p);
    case DType::f16:
      return run<Half>(p);
    default:
      return Status::unsupported_dtype;
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
