#include "suffix_tree/texts.h"

#include <stdexcept>

namespace specdec {

TokenBlocks::TokenBlocks(int overlap) : overlap_(overlap) {
  while (1 << shift_ < overlap) ++shift_;
  mask_ = (1u << shift_) - 1;
  stride_ = (1u << shift_) + overlap;
}

uint32_t TokenBlocks::take(uint32_t order) {
  uint32_t block = free_;
  if (block != kNoBlock) {
    free_ = blocks_[block].next;
  } else {
    // Positions take 31 bits.
    if (blocks_.size() + 1 >= 1u << (31 - shift_))
      throw std::length_error("SuffixTree: too many tokens");
    block = static_cast<uint32_t>(blocks_.add(1));
    tokens_.add(stride_);
  }
  blocks_[block] = {0, kNoBlock, order};
  return block;
}

void TokenBlocks::push(Text& text, int32_t token, uint32_t order) {
  const int offset = static_cast<int>(text.length & mask_);
  if (offset == 0) {
    const uint32_t block = take(order);
    if (text.last == kNoBlock) {
      text.first = block;
    } else {
      blocks_[text.last].next = block;
    }
    text.previous = text.last;
    text.last = block;
  }
  tokens_[uint64_t(text.last) * stride_ + offset] = token;
  blocks_[text.last].filled = offset + 1;
  if (offset < overlap_ && text.previous != kNoBlock) {
    const int beyond = (1 << shift_) + offset;
    tokens_[uint64_t(text.previous) * stride_ + beyond] = token;
    blocks_[text.previous].filled = beyond + 1;
  }
  ++text.length;
}

void TokenBlocks::release(Text& text) {
  if (text.last != kNoBlock) {
    blocks_[text.last].next = free_;
    free_ = text.first;
  }
  text = Text();
}

}  // namespace specdec
