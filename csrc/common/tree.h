// Walking a verify window and writing an Acceptance.
#pragma once

#include "common/sampling.h"

#ifndef SPECDEC_ISA
#error "tree.h belongs to per-ISA objects: SPECDEC_ISA names the namespace"
#endif

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// One row of the batch.
struct Window {
  const int64_t* tokens;
  const int32_t* parents;
  int64_t num_nodes;

  Window(const WindowArrays& all, int64_t b)
      : tokens(all.draft_token_ids + b * all.width), parents(all.parents + b * all.width) {
    const int64_t wanted = all.num_nodes[b];
    num_nodes = wanted < 0 ? 0 : wanted < all.width ? wanted : all.width;
  }

  // The parent of a drafted slot; the root's for one that names no earlier slot.
  int64_t parent(int64_t slot) const {
    const int64_t named = parents[slot];
    return named > 0 && named < slot ? named : 0;
  }
  // The next child of slot after `previous`, or -1. Children stand behind their parent.
  int64_t next_child(int64_t slot, int64_t previous) const {
    for (int64_t child = (previous > slot ? previous : slot) + 1; child < num_nodes; ++child)
      if (parents[child] == slot) return child;
    return -1;
  }
  int64_t child_with_token(int64_t slot, int64_t token) const {
    int64_t child = next_child(slot, slot);
    while (child >= 0 && tokens[child] != token) child = next_child(slot, child);
    return child;
  }
};

// Appends to one row of the Acceptance; finish() pads it.
class AcceptanceRow {
 public:
  AcceptanceRow(const AcceptanceArrays& all, int64_t width, int64_t b)
      : path_(all.path + b * width),
        tokens_(all.output_token_ids + b * width),
        num_accepted_(all.num_accepted + b),
        status_(all.status + b),
        width_(width) {
    *status_ = kRowOk;
  }
  void append(int64_t slot, int64_t token, int32_t status) {
    path_[length_] = int32_t(slot);
    tokens_[length_++] = token;
    *status_ |= status;
  }
  void finish() {
    *num_accepted_ = length_ > 0 ? int32_t(length_ - 1) : 0;
    for (; length_ < width_; ++length_) path_[length_] = -1, tokens_[length_] = -1;
  }

 private:
  int32_t* path_;
  int64_t* tokens_;
  int32_t* num_accepted_;
  int32_t* status_;
  int64_t width_;
  int64_t length_ = 0;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
