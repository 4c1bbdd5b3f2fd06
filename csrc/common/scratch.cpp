#include "common/scratch.h"

#include <cstdlib>

namespace specdec {
namespace {

struct Block {
  void* data = nullptr;
  std::size_t size = 0;
  ~Block() { std::free(data); }
};

}  // namespace

void* thread_scratch(int slot, std::size_t bytes) noexcept {
  thread_local Block blocks[kScratchSlots];
  Block& block = blocks[slot];
  if (block.size < bytes) {
    std::free(block.data);
    block.size = (bytes + 4095) & ~std::size_t(4095);
    block.data = std::aligned_alloc(64, block.size);
    if (block.data == nullptr) block.size = 0;
  }
  return block.data;
}

}  // namespace specdec
