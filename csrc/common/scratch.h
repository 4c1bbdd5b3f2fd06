#pragma once

#include <cstddef>

namespace specdec {

// 64-byte aligned memory of the calling thread, kept and grown between calls; its content is
// undefined. Each slot is a separate block. Returns nullptr when memory runs out.
void* thread_scratch(int slot, std::size_t bytes) noexcept;
constexpr int kScratchSlots = 11;

}  // namespace specdec
