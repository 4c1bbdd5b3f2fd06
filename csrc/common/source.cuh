// The logits of one row: read in packs of 16 bytes, edited on the way into registers.
#pragma once

#include "common/edits.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// The logits of a batch, [batch, width, vocab], and what changes them.
struct LogitRows {
  const void* logits;
  int64_t stride_b;
  int64_t stride_t;
  int64_t vocab;
  EditArrays edits;
  EditTables tables;
  WindowArrays window;
};

// Bits first .. first + 31 of an array of words.
SPECDEC_INLINE uint32_t bits_from(const uint32_t* words, int64_t first, int64_t num_words) {
  const int64_t at = first / 32;
  const uint32_t low = words[at], high = at + 1 < num_words ? words[at + 1] : 0u;
  return __funnelshift_r(low, high, static_cast<unsigned>(first % 32));
}

// One element of a pack by a number that the compiler does not know: an index would put the pack
// into local memory.
template <class V, int kPack>
SPECDEC_INLINE V pick(const V (&pack)[kPack], int at) {
  V chosen = pack[0];
#pragma unroll
  for (int i = 1; i < kPack; ++i) chosen = i == at ? pack[i] : chosen;
  return chosen;
}

template <class T>
class Source {
 public:
  static constexpr int kPack = 16 / sizeof(T);

  __device__ Source(const LogitRows& rows, int64_t b, int64_t slot)
      : rows_(rows),
        data_(static_cast<const T*>(rows.logits) + b * rows.stride_b + slot * rows.stride_t),
        b_(b),
        slot_(slot) {}

  __device__ int64_t size() const { return rows_.vocab; }

  __device__ float value(int64_t id) const {
    const float logit = to_float(data_[id]);
    if (!is_edited()) return logit;
    if (!(allowed_from(id) & 1u)) return -kInfinity;
    return marked_from(id) & 1u ? edit(id, logit) : logit;
  }

  // visit(x, first) for the logits x[kPack] of tokens first, first + 1, ...; all of begin .. end
  // are dealt out to the threads of the block, each seeing ascending tokens in turn. At the ends a
  // pack has one token, and -infinity behind it.
  template <class Visit>
  __device__ void each_pack(int64_t begin, int64_t end, Visit visit) const {
    const int64_t misaligned = reinterpret_cast<uintptr_t>(data_ + begin) / sizeof(T) % kPack;
    const int64_t head = min(end - begin, (kPack - misaligned) % kPack);
    const int64_t packs = (end - begin - head) / kPack;
    const int64_t tail = end - begin - head - packs * kPack;
    const auto* aligned = reinterpret_cast<const Pack<T>*>(data_ + begin + head);
    Pack<T> next{},
        after{};  // under way during visit: one load has too little of the memory's latency
    if (threadIdx.x < packs) next = aligned[threadIdx.x];
    if (threadIdx.x + kThreads < packs) after = aligned[threadIdx.x + kThreads];
#pragma unroll 1  // the body is large, and the next loads are under way already
    for (int64_t i = threadIdx.x; i < packs + head + tail; i += kThreads) {
      float x[kPack];
      int64_t first = begin + head + i * kPack;
      if (i < packs) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) x[j] = to_float(next.values[j]);
        next = after;
        if (i + 2 * kThreads < packs) after = aligned[i + 2 * kThreads];
        if (is_edited()) edit_pack(x, first);
      } else {
        const int64_t edge = i - packs;
        first = edge < head ? begin + edge : begin + packs * kPack + edge;
#pragma unroll
        for (int j = 1; j < kPack; ++j) x[j] = -kInfinity;
        x[0] = value(first);
      }
      visit(x, first);
    }
  }

 private:
  __device__ bool is_edited() const {
    return rows_.tables.marks != nullptr || rows_.edits.allowed_tokens != nullptr;
  }
  __device__ float edit(int64_t id, float logit) const {
    return edited(rows_.edits, rows_.tables, rows_.window, b_, slot_, id, logit);
  }
  __device__ uint32_t marked_from(int64_t first) const {
    if (rows_.tables.marks == nullptr) return 0u;
    const uint32_t* marks = rows_.tables.marks + b_ * rows_.tables.mark_words;
    return bits_from(marks, first, rows_.tables.mark_words);
  }
  __device__ uint32_t allowed_from(int64_t first) const {
    if (rows_.edits.allowed_tokens == nullptr) return ~0u;
    const int64_t words = (rows_.vocab + 31) / 32;
    const int32_t* allowed = rows_.edits.allowed_tokens + (b_ * rows_.window.width + slot_) * words;
    return bits_from(reinterpret_cast<const uint32_t*>(allowed), first, words);
  }
  __device__ void edit_pack(float (&x)[kPack], int64_t first) const {
    const uint32_t allowed = allowed_from(first);
    uint32_t marked = marked_from(first) & ((1u << kPack) - 1u);
    while (marked != 0) {  // seldom: one copy of the code, and x stays in registers
      const int at = __ffs(static_cast<int>(marked)) - 1;
      marked &= marked - 1u;
      const float changed = edit(first + at, to_float(data_[first + at]));
#pragma unroll
      for (int j = 0; j < kPack; ++j) x[j] = j == at ? changed : x[j];
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) x[j] = allowed >> j & 1u ? x[j] : -kInfinity;
  }

  const LogitRows& rows_;
  const T* data_;
  int64_t b_, slot_;
};

// ---- processed logits, less their maximum

struct Scale {
  float temperature;
  float largest;  // of the logits / temperature
  float inverse;  // of the temperature, about

  SPECDEC_INLINE Scale(float row_temperature, float largest_logit)
      : temperature(row_temperature < 0x1.fffffep+127f ? row_temperature : 0x1.fffffep+127f),
        largest(largest_logit / temperature),
        inverse(min(1.0f / temperature, 0x1.fffffep+127f)) {}

  SPECDEC_INLINE float scaled(float logit) const {
    return temperature == 1.0f ? logit : logit / temperature;
  }
  // +infinity counts as one-hot.
  SPECDEC_INLINE float value(float logit) const {
    const float x = scaled(logit);
    if (largest == kInfinity) return x == kInfinity ? 0.0f : -kInfinity;
    return x - largest;
  }
  // scaled() and value() without a division, about; at least as large as the true one where that is
  // infinite.
  SPECDEC_INLINE float scaled_bound(float logit) const { return logit * inverse; }
  SPECDEC_INLINE float value_bound(float logit) const {
    return largest == kInfinity ? 0.0f : logit * inverse - largest;
  }
};

// The largest of a pack, NaN if any is.
template <int kPack>
SPECDEC_INLINE float highest_of(const float (&x)[kPack]) {
  float highest = x[0];
#pragma unroll
  for (int j = 1; j < kPack; ++j) highest = max_or_nan(highest, x[j]);
  return highest;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
