#pragma once

#include <cstdint>

#include "suffix_tree/pool.h"

namespace specdec {

constexpr int32_t kEnd = -1;  // stands behind the last token of a closed text
constexpr uint32_t kNoBlock = ~0u;

// One text in TokenBlocks.
struct Text {
  uint32_t first = kNoBlock;
  uint32_t last = kNoBlock;
  uint32_t previous = kNoBlock;  // the block before the last one
  int64_t length = 0;
};

// The tokens of many growing texts, in blocks that texts take and give back. Every block also holds
// the first `overlap` tokens of the next one, so that so many tokens can be read in one piece from
// wherever one starts. A position is one number, and stays the same while its text exists.
class TokenBlocks {
 public:
  explicit TokenBlocks(int overlap);

  // `order` is remembered with the text's blocks.
  void push(Text& text, int32_t token, uint32_t order);
  void release(Text& text);

  uint32_t begin_of(uint32_t block) const { return block << shift_; }
  // The position one further in the same text, kNoBlock behind its last block.
  uint32_t next(uint32_t position) const {
    if (~position & mask_) return position + 1;
    const uint32_t block = blocks_[position >> shift_].next;
    return block == kNoBlock ? kNoBlock : begin_of(block);
  }
  // The position `count` further, at most one block.
  uint32_t forward(uint32_t position, uint32_t count) const {
    const uint32_t offset = (position & mask_) + count;
    if (offset <= mask_) return position + count;
    const uint32_t block = blocks_[position >> shift_].next;
    return begin_of(block) + (offset & mask_);
  }
  const int32_t* at(uint32_t position) const {
    return tokens_.data() + uint64_t(position >> shift_) * stride_ + (position & mask_);
  }
  // How many tokens can be read from a position on: all there are, or at least `overlap`.
  int available(uint32_t position) const {
    return blocks_[position >> shift_].filled - int(position & mask_);
  }
  uint32_t order(uint32_t position) const { return blocks_[position >> shift_].order; }
  int64_t bytes() const { return tokens_.bytes() + blocks_.bytes(); }

 private:
  struct Block {
    int32_t filled;
    uint32_t next;  // in its text, or among the free ones
    uint32_t order;
  };

  uint32_t take(uint32_t order);

  int overlap_;
  int shift_ = 6;
  uint32_t mask_;
  uint32_t stride_;
  uint32_t free_ = kNoBlock;
  Pool<int32_t> tokens_;
  Pool<Block> blocks_;
};

}  // namespace specdec
