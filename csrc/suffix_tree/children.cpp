#include "suffix_tree/children.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace specdec {
namespace {

constexpr uint32_t kNone = ~0u;
static_assert(sizeof(Child) == 12 && alignof(Child) == alignof(uint32_t));

uint32_t hash(int32_t token, uint32_t size) {
  const uint32_t mixed = static_cast<uint32_t>(token) * 0x9e3779b1u;
  return static_cast<uint32_t>(uint64_t(mixed) * size >> 32);
}

}  // namespace

ChildLists::ChildLists() { std::fill_n(free_, kClasses, kNone); }

uint32_t ChildLists::take(int size_class) {
  const bool with_index = size_class >= kFirstIndexed;
  const std::size_t count = 3 * capacity(size_class) + (with_index ? index_size(size_class) : 0);
  uint32_t block = free_[size_class];
  if (block != kNone) {
    free_[size_class] = words_[block];
  } else {
    if (words_.size() + count >= kNone) throw std::length_error("SuffixTree: too many tokens");
    block = static_cast<uint32_t>(words_.add(count));
  }
  if (with_index)
    std::fill_n(words_.data() + block + 3 * capacity(size_class), index_size(size_class), 0u);
  return block;
}

ChildList ChildLists::make() { return {take(0), 0, 0}; }

void ChildLists::release(const ChildList& list) {
  words_[list.block] = free_[list.size_class];
  free_[list.size_class] = list.block;
}

void ChildLists::move(ChildList& list, int size_class) {
  const ChildList moved{take(size_class), list.size, static_cast<uint32_t>(size_class)};
  std::memcpy(begin(moved), begin(list), list.size * sizeof(Child));
  if (indexed(moved))
    for (uint32_t i = 0; i < moved.size; ++i)
      index_of(moved)[slot_of(moved, begin(moved)[i].token)] = i + 1;
  release(list);
  list = moved;
}

// Where a token is in the hash table, or the free place for it.
uint32_t ChildLists::slot_of(const ChildList& list, int32_t token) const {
  const uint32_t* index = index_of(list);
  const Child* children = begin(list);
  const uint32_t size = index_size(list.size_class);
  uint32_t slot = hash(token, size);
  while (index[slot] != 0 && children[index[slot] - 1].token != token)
    slot = (slot + 1) & (size - 1);
  return slot;
}

// Empties a place of the hash table; what was put behind it for want of room moves up.
void ChildLists::erase_slot(const ChildList& list, uint32_t slot) {
  uint32_t* index = index_of(list);
  const uint32_t mask = index_size(list.size_class) - 1;
  for (uint32_t next = (slot + 1) & mask; index[next] != 0; next = (next + 1) & mask) {
    const uint32_t home = hash(begin(list)[index[next] - 1].token, mask + 1);
    if (((next - home) & mask) < ((next - slot) & mask)) continue;
    index[slot] = index[next];
    slot = next;
  }
  index[slot] = 0;
}

int64_t ChildLists::find(const ChildList& list, int32_t token) const {
  if (indexed(list)) return int64_t(index_of(list)[slot_of(list, token)]) - 1;
  const Child* children = begin(list);
  for (uint32_t i = 0; i < list.size; ++i)
    if (children[i].token == token) return i;
  return -1;
}

void ChildLists::swap(const ChildList& list, int64_t a, int64_t b) {
  if (a == b) return;
  Child* children = begin(list);
  if (indexed(list)) {
    const uint32_t slot_a = slot_of(list, children[a].token);
    const uint32_t slot_b = slot_of(list, children[b].token);
    std::swap(index_of(list)[slot_a], index_of(list)[slot_b]);
  }
  std::swap(children[a], children[b]);
}

// The first of the children before `end` whose count is at most `count`, or `end`.
int64_t ChildLists::first_with_at_most(const ChildList& list, uint32_t count, int64_t end) const {
  const Child* children = begin(list);
  if (end == 0 || children[end - 1].count > count) return end;
  const auto more = [](const Child& child, uint32_t limit) { return child.count > limit; };
  return std::lower_bound(children, children + end, count, more) - children;
}

void ChildLists::add(ChildList& list, const Child& child, bool sorted) {
  if (list.size == capacity(list.size_class)) move(list, list.size_class + 1);
  const int64_t index = list.size++;
  begin(list)[index] = child;
  if (indexed(list)) index_of(list)[slot_of(list, child.token)] = static_cast<uint32_t>(index + 1);
  if (sorted) swap(list, index, first_with_at_most(list, child.count, index));
}

void ChildLists::increment(ChildList& list, int64_t index, bool sorted) {
  const uint32_t count = begin(list)[index].count++;
  if (!sorted) return;
  const int64_t same = first_with_at_most(list, count, index);
  swap(list, index, same);
  swap(list, same, first_with_at_most(list, count + 1, same));
}

void ChildLists::decrement(ChildList& list, int64_t index, bool sorted) {
  Child* children = begin(list);
  const uint32_t count = children[index].count;
  int64_t last = list.size - 1;
  if (sorted && count > 1)
    last = std::lower_bound(children + index, children + list.size, count - 1,
                            [](const Child& c, uint32_t limit) { return c.count > limit; }) -
           children - 1;
  if (sorted || count == 1) swap(list, index, last);
  if (!sorted && count > 1) last = index;
  if (--children[last].count > 0) return;
  if (indexed(list)) erase_slot(list, slot_of(list, children[last].token));
  --list.size;
  if (list.size_class >= 4 && 4 * list.size <= capacity(list.size_class))
    move(list, list.size_class - 2);
}

}  // namespace specdec
