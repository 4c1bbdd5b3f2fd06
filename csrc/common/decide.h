// Deciding many rows at once: the token of each is the argmax, or a draw, of its logits.
#pragma once

#include "common/element.h"
#include "common/kept_set.h"
#include "common/status.h"
#include "common/tree.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Slots of thread_scratch.
constexpr int kDecideScratch = 0;
constexpr int kNodeScratch = 2;

// One row to decide, and what came out.
struct Decision {
  int64_t b;
  int64_t slot;
  int64_t position;
  int64_t token;
  int32_t status;
};

// Elements below which a second thread costs more than it brings.
constexpr int64_t kSmallestParallel = 1 << 15;

// What a row is drawn from; `decided` rows have one possible token.
struct Distribution {
  bool decided;
  int64_t token;
  int32_t status;
  KeptSet kept;
};

// The one token of a row at temperature 0.
template <class Source>
void decide_greedy(const Source& row, const Extreme& extreme, int64_t& token, int32_t& status) {
  token = extreme.has_nan ? find_largest_finite(row) : extreme.id;
  status = extreme.has_nan ? kRowNan : extreme.largest == -kInfinity ? kRowEmpty : kRowOk;
}

// Everything about a row but the draw. False when memory runs out.
template <class Source>
bool distribution_of(const Row<Source>& row, const Extreme& extreme, const SamplingArrays& sampling,
                     int64_t b, Distribution& result) {
  decide_greedy(row.source, extreme, result.token, result.status);
  result.decided = true;
  if (!(sampling.temperature[b] > 0.0f) || result.status != kRowOk) return true;
  if (row.largest == -kInfinity) {
    result.status = kRowEmpty;
    return true;
  }
  result.decided = false;
  return find_kept_set(row, sampling.top_k[b], sampling.top_p[b], sampling.min_p[b], result.kept);
}

// How the vocabulary is cut so that few rows still keep all threads busy. The cuts change nothing
// in the result.
struct Chunks {
  int64_t count;
  int64_t size;

  Chunks(int64_t rows, int64_t vocab, int threads) {
    constexpr int64_t kSmallest = 8192;
    const int64_t wanted = rows < threads ? (threads + rows - 1) / rows : 1;
    const int64_t most = (vocab + kSmallest - 1) / kSmallest;
    count = wanted < most ? wanted : most;
    size = ((vocab + count - 1) / count + kStride - 1) / kStride * kStride;
    count = (vocab + size - 1) / size;
  }
};

struct DecideWorkspace {
  Extreme* extremes;            // [rows, chunks]
  Drawn* drawn;                 // [rows, chunks]
  Distribution* distributions;  // [rows]
  float* strides;               // [rows, num_strides]

  bool allocate(int64_t rows, int64_t chunks, int64_t row_strides) {
    const size_t pieces = size_t(rows) * size_t(chunks);
    char* memory = static_cast<char*>(
        thread_scratch(kDecideScratch, pieces * (sizeof(Extreme) + sizeof(Drawn)) +
                                           size_t(rows) * sizeof(Distribution) +
                                           size_t(rows * row_strides) * sizeof(float) + 64));
    extremes = reinterpret_cast<Extreme*>(memory);
    drawn = reinterpret_cast<Drawn*>(extremes + pieces);
    distributions = reinterpret_cast<Distribution*>(drawn + pieces);
    strides = reinterpret_cast<float*>(distributions + rows);
    return memory != nullptr;
  }
};

template <class Rows>
void find_extremes(const Rows& logits, const Decision* rows, int64_t num_rows, const Chunks& chunks,
                   Extreme* extremes, float* strides, int threads) {
  const int64_t work = num_rows * chunks.count;
  const bool worth = work > 1 && num_rows * logits.vocab() > kSmallestParallel;
#pragma omp parallel for num_threads(threads) schedule(static) if (worth)
  for (int64_t i = 0; i < work; ++i) {
    const Decision& row = rows[i / chunks.count];
    const int64_t begin = i % chunks.count * chunks.size;
    const int64_t end = begin + chunks.size < logits.vocab() ? begin + chunks.size : logits.vocab();
    float* row_strides =
        strides == nullptr ? nullptr : strides + i / chunks.count * num_strides(logits.vocab());
    extremes[i] = find_extreme(logits.source(row.b, row.slot), begin, end, row_strides);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t c = 1; c < chunks.count; ++c)
      extremes[r * chunks.count].merge_later(extremes[r * chunks.count + c]);
  }
}

// The argmax of each row.
template <class Rows>
Status decide_greedy_rows(const Rows& logits, Decision* rows, int64_t num_rows, int threads) {
  if (num_rows == 0) return Status::ok;
  const Chunks chunks(num_rows, logits.vocab(), threads);
  DecideWorkspace work;
  if (!work.allocate(num_rows, chunks.count, 0)) return Status::out_of_memory;
  find_extremes(logits, rows, num_rows, chunks, work.extremes, nullptr, threads);
  for (int64_t r = 0; r < num_rows; ++r)
    decide_greedy(logits.source(rows[r].b, rows[r].slot), work.extremes[r * chunks.count],
                  rows[r].token, rows[r].status);
  return Status::ok;
}

// A draw from the processed distribution of each row.
template <class Rows>
Status decide_rows(const Rows& logits, const SamplingArrays& sampling, uint32_t stream,
                   Decision* rows, int64_t num_rows, int threads) {
  if (num_rows == 0) return Status::ok;
  const int64_t vocab = logits.vocab();
  const Chunks chunks(num_rows, vocab, threads);
  DecideWorkspace work;
  const int64_t strides = num_strides(vocab);
  if (!work.allocate(num_rows, chunks.count, strides)) return Status::out_of_memory;
  find_extremes(logits, rows, num_rows, chunks, work.extremes, work.strides, threads);
  const auto row_of = [&](int64_t r) {
    return Row<typename Rows::Source>(
        logits.source(rows[r].b, rows[r].slot), sampling.temperature[rows[r].b],
        work.extremes[r * chunks.count].largest, work.strides + r * strides);
  };
  const auto noise_of = [&](int64_t r) {
    return Noise(sampling.seed[rows[r].b], rows[r].position, stream);
  };
  int failed = 0;
#pragma omp parallel for num_threads(threads)                                   \
    schedule(dynamic) if (num_rows > 1 && num_rows * vocab > kSmallestParallel) \
    reduction(+ : failed)
  for (int64_t r = 0; r < num_rows; ++r) {
    Distribution& distribution = work.distributions[r] = Distribution();
    failed += !distribution_of(row_of(r), work.extremes[r * chunks.count], sampling, rows[r].b,
                               distribution);
    if (distribution.decided || !distribution.kept.is_listed()) continue;
    distribution.token = draw_listed(distribution.kept.list, noise_of(r), nullptr, 0).id;
    distribution.decided = true;
  }
  if (failed) return Status::out_of_memory;
  const int64_t pieces = num_rows * chunks.count;
#pragma omp parallel for num_threads(threads) \
    schedule(dynamic) if (pieces > 1 && num_rows * vocab > kSmallestParallel)
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t r = i / chunks.count, begin = i % chunks.count * chunks.size;
    work.drawn[i] = Drawn();
    if (work.distributions[r].decided) continue;
    const int64_t end = begin + chunks.size < vocab ? begin + chunks.size : vocab;
    work.drawn[i] = draw_kept(row_of(r), work.distributions[r].kept, noise_of(r), begin, end);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    Drawn* drawn = work.drawn + r * chunks.count;
    for (int64_t c = 1; c < chunks.count; ++c) drawn->merge_later(drawn[c]);
    const Distribution& distribution = work.distributions[r];
    rows[r].status = distribution.status;
    rows[r].token = distribution.decided ? distribution.token : drawn->id;
  }
  return Status::ok;
}

// Walks every window from its root, level by level: each row asks for the target's choice (the
// argmax without `sampling`, else a draw) at one node, and goes on to the first child that drafted
// it. Rows of logits off the path are never read.
template <class Rows>
Status verify(const Rows& logits, const WindowArrays& all, const SamplingArrays* sampling,
              const AcceptanceArrays& acceptance, int threads) {
  const size_t each = sizeof(Decision) + sizeof(AcceptanceRow);
  void* memory = thread_scratch(kNodeScratch, size_t(all.batch) * each + 64);
  if (memory == nullptr) return Status::out_of_memory;
  auto* walking = static_cast<Decision*>(memory);
  auto* results = reinterpret_cast<AcceptanceRow*>(walking + all.batch);
  int64_t count = 0;
  for (int64_t b = 0; b < all.batch; ++b) {
    results[b] = AcceptanceRow(acceptance, all.width, b);
    if (Window(all, b).num_nodes == 0) continue;
    walking[count++] = {b, 0, sampling == nullptr ? 0 : sampling->position[b], 0, kRowOk};
  }
  while (count > 0) {
    const Status status =
        sampling == nullptr ? decide_greedy_rows(logits, walking, count, threads)
                            : decide_rows(logits, *sampling, kBonusStream, walking, count, threads);
    if (status != Status::ok) return status;
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Decision row = walking[i];
      results[row.b].append(row.slot, row.token, row.status);
      const int64_t child = Window(all, row.b).child_with_token(row.slot, row.token);
      if (child >= 0) walking[left++] = {row.b, child, row.position + 1, 0, kRowOk};
    }
    count = left;
  }
  for (int64_t b = 0; b < all.batch; ++b) results[b].finish();
  return Status::ok;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
