#include "topk_logprobs/topk_logprobs.h"

#include "common/decide.h"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// The best keys of the row, sorted; NaN and -infinity are never among them. The k-th largest stride
// is at most the k-th best logit, so that only strides which reach it, about k of them, are
// searched.
template <class Source>
void select_best(Source row, const float* maxima, TopKeys& best, TopKeys strides) {
  const int64_t count = num_strides(row.size());
  for (int64_t i = 0; i < count; ++i) strides.offer(to_key(maxima[i], i));
  // The smallest value that may still enter; of equal ones the first stays.
  float lowest = strides.full() ? key_value(strides.worst()) : -kInfinity;
  for (int64_t i = 0; i < count; ++i) {
    if (!(maxima[i] >= lowest)) continue;
    each_vector_of_stride(i * kStride, row.size(),
                          [&](int64_t first, int64_t end) __attribute__((always_inline)) {
                            const F32 values = row.vector(first, end);
                            if (!any(values >= lowest)) return;
                            for (int lane = 0; lane < kLanes; ++lane)
                              if (values[lane] >= lowest && values[lane] > -kInfinity)
                                best.offer(to_key(values[lane], first + lane));
                            if (best.full() && key_value(best.worst()) > lowest)
                              lowest = key_value(best.worst());
                          });
  }
  best.sort();
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
  uint64_t *best, *strides;
  int64_t* masses;
  float* maxima;
  int64_t capacity;

  bool allocate(const TopkLogprobsParams& p, int64_t chunks) {
    capacity = p.k < p.vocab ? p.k : p.vocab;
    const size_t words = size_t(2 * capacity + chunks);
    void* memory = thread_scratch(
        kDecideScratch, words * sizeof(uint64_t) + size_t(num_strides(p.vocab)) * sizeof(float));
    best = static_cast<uint64_t*>(memory);
    strides = best + capacity;
    masses = reinterpret_cast<int64_t*>(strides + capacity);
    maxima = reinterpret_cast<float*>(masses + chunks);
    return memory != nullptr;
  }
};

// One row, cut into `chunks` pieces of `size` logits for as many threads.
template <class T>
bool decide_row(const TopkLogprobsParams& p, int64_t r, int64_t chunks, int64_t size) {
  Workspace work;
  if (!work.allocate(p, chunks)) return false;
  const PlainSource<T> source(static_cast<const T*>(p.logits) + r * p.stride, p.vocab);
  const auto end_of = [&](int64_t c) {
    return (c + 1) * size < p.vocab ? (c + 1) * size : p.vocab;
  };
#pragma omp parallel for num_threads(int(chunks)) schedule(static) if (chunks > 1)
  for (int64_t c = 0; c < chunks; ++c) find_extreme(source, c * size, end_of(c), work.maxima);
  TopKeys best(work.best, work.capacity);
  select_best(source, work.maxima, best, TopKeys(work.strides, work.capacity));
  const Row<PlainSource<T>> row(source, 1.0f, best.size() > 0 ? key_value(best[0]) : -kInfinity,
                                work.maxima);
#pragma omp parallel for num_threads(int(chunks)) schedule(static) if (chunks > 1)
  for (int64_t c = 0; c < chunks; ++c)
    work.masses[c] = mass_above(row, kNegligible, p.vocab, c * size, end_of(c));
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
    for (int64_t r = 0; r < p.rows; ++r) failed += !decide_row<T>(p, r, chunks.count, chunks.size);
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
  return with_element(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
