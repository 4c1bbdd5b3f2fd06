#pragma once

#include <cstdint>

#include "suffix_tree/pool.h"

namespace specdec {

// The child of a node that begins with `token`: another node, or, with kLeaf set, a position.
struct Child {
  int32_t token;
  uint32_t count;  // suffixes that pass
  uint32_t child;
};

constexpr uint32_t kLeaf = 1u << 31;

// The children of one node, in ChildLists; the most counted first, and among equally counted ones
// first the one that was counted last, until something is removed.
struct ChildList {
  uint32_t block = 0;
  uint32_t size : 26;
  uint32_t size_class : 6;
};

// Child lists of any size in one arena. Room that a list outgrows or gives back serves others of
// the same size. Up to 16 children are searched one by one, more by a hash table behind them.
class ChildLists {
 public:
  ChildLists();

  ChildList make();
  void release(const ChildList& list);

  Child* begin(const ChildList& list) {
    return reinterpret_cast<Child*>(words_.data() + list.block);
  }
  const Child* begin(const ChildList& list) const {
    return reinterpret_cast<const Child*>(words_.data() + list.block);
  }
  // Index of the child that begins with `token`, or -1.
  int64_t find(const ChildList& list, int32_t token) const;
  // A child with count 1, or another; `sorted`: keeps the order.
  void add(ChildList& list, const Child& child, bool sorted);
  void increment(ChildList& list, int64_t index, bool sorted);
  // Decrements, and removes what has no count left.
  void decrement(ChildList& list, int64_t index, bool sorted);

  int64_t bytes() const { return words_.bytes(); }

 private:
  static constexpr int kClasses = 48;
  static constexpr int kFirstIndexed = 7;

  static uint32_t capacity(int size_class) { return (2u + (size_class & 1)) << (size_class >> 1); }
  static uint32_t index_size(int size_class) { return 4u << (size_class >> 1); }
  static bool indexed(const ChildList& list) { return list.size_class >= kFirstIndexed; }

  uint32_t take(int size_class);
  void move(ChildList& list, int size_class);
  uint32_t* index_of(const ChildList& list) {
    return words_.data() + list.block + 3 * capacity(list.size_class);
  }
  const uint32_t* index_of(const ChildList& list) const {
    return words_.data() + list.block + 3 * capacity(list.size_class);
  }
  uint32_t slot_of(const ChildList& list, int32_t token) const;
  void erase_slot(const ChildList& list, uint32_t slot);
  void swap(const ChildList& list, int64_t a, int64_t b);
  int64_t first_with_at_most(const ChildList& list, uint32_t count, int64_t end) const;

  Pool<uint32_t> words_;
  uint32_t free_[kClasses];
};

}  // namespace specdec
