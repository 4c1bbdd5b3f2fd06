// Floats as integers of the same order, and the largest of many (value, index) pairs.
#pragma once

#include "common/target.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

SPECDEC_INLINE uint32_t ordered_key(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value + 0.0f);  // -0 becomes 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
SPECDEC_INLINE float from_ordered_key(uint32_t key) {
  return bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The larger key is better: it has the higher value, or among equal values the lower index.
SPECDEC_INLINE uint64_t to_key(float value, int64_t index) {
  return uint64_t(ordered_key(value)) << 32 | uint32_t(~uint32_t(index));
}
SPECDEC_INLINE int64_t key_index(uint64_t key) { return uint32_t(~uint32_t(key)); }
SPECDEC_INLINE float key_value(uint64_t key) { return from_ordered_key(uint32_t(key >> 32)); }

#if !defined(SPECDEC_DEVICE)
// The best `capacity` of the keys offered, in memory of the caller; a heap, worst key first.
class TopKeys {
 public:
  TopKeys(uint64_t* memory, int64_t capacity) : keys_(memory), capacity_(capacity) {}

  int64_t size() const { return size_; }
  bool full() const { return size_ == capacity_; }
  uint64_t worst() const { return keys_[0]; }
  uint64_t operator[](int64_t i) const { return keys_[i]; }

  void offer(uint64_t key) {
    if (!full()) {
      sift_up(size_++, key);
    } else if (capacity_ > 0 && key > keys_[0]) {
      sift_down(key, size_);
    }
  }
  // Best first; nothing can be offered afterwards.
  void sort() {
    for (int64_t end = size_ - 1; end > 0; --end) {
      const uint64_t last = keys_[end];
      keys_[end] = keys_[0];
      sift_down(last, end);
    }
  }

 private:
  void sift_up(int64_t at, uint64_t key) {
    while (at > 0 && keys_[(at - 1) / 2] > key) {
      keys_[at] = keys_[(at - 1) / 2];
      at = (at - 1) / 2;
    }
    keys_[at] = key;
  }
  // Puts `key` in the place of the root of a heap of `size` keys.
  void sift_down(uint64_t key, int64_t size) {
    int64_t at = 0;
    for (int64_t child = 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && keys_[child + 1] < keys_[child]) ++child;
      if (keys_[child] >= key) break;
      keys_[at] = keys_[child];
      at = child;
    }
    keys_[at] = key;
  }

  uint64_t* keys_;
  int64_t capacity_;
  int64_t size_ = 0;
};
#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
