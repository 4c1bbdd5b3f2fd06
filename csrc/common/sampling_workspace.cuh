// How the sampling kernels divide their workspace, and how edits are made ready.
#pragma once

#include "common/decide.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Hands out parts of zeroed memory, or only counts them where `memory` is null.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class Item>
  Item* take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * static_cast<int64_t>(sizeof(Item)) + 15) / 16 * 16;
    return memory_ == nullptr ? nullptr : reinterpret_cast<Item*>(memory_ + at);
  }
  int64_t words() const { return used_ / 8; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

inline EditTables take_edit_tables(Arena& arena, const EditArrays& edits,
                                   const WindowArrays& window, int64_t vocab) {
  EditTables tables{};
  const bool has_penalties = edits.repetition_penalty != nullptr ||
                             edits.presence_penalty != nullptr ||
                             edits.frequency_penalty != nullptr;
  if (edits.token_ids == nullptr && !has_penalties) return tables;
  tables.num_places = 2;
  while (tables.num_places < 2 * edits.num_tokens) tables.num_places *= 2;
  tables.places = arena.take<Place>(window.batch * tables.num_places);
  tables.mark_words = (vocab + 31) / 32 + 1;
  tables.marks = arena.take<uint32_t>(window.batch * tables.mark_words);
  return tables;
}

inline cudaError_t list_edits(const LogitRows& rows, cudaStream_t stream) {
  if (rows.tables.marks == nullptr) return cudaSuccess;
  return launch(list_edits_kernel, static_cast<unsigned>(rows.window.batch), kThreads, 0, stream,
                rows.edits, rows.tables, rows.window, rows.vocab);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
