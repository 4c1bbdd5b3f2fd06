// What the kernels tell each other about the nodes of a window.
#pragma once

#include "common/sampling_workspace.cuh"
#include "rejection_sample/rejection_sample.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Target and draft after one slot.
struct alignas(16) Node {
  int64_t token;  // the one possible or, under `coupled`, the drawn token
  int64_t mass;   // of the kept tokens, in fixed point
  int32_t decided;
  int32_t status;
  Scale scale = Scale(1.0f, 0.0f);
  float threshold;
  float total;   // the mass as a float: what weights are divided by
  float lowest;  // under `typical` tokens stand above this probability
  int32_t draft_status;
  float draft_largest;
  float draft_total;
};

// A rejected child: the totals that target and draft were divided by when it was tried.
struct Round {
  int64_t tried;
  float target_total;
  float draft_total;
};

// The token that is still to be drawn, where it is written and what it is drawn from.
enum class Draws : int32_t { nothing = 0, kept = 1, without_tried = 2, residual = 3, block = 4 };
struct Job {
  Draws draws;
  int32_t slot;
  int32_t index;  // in the row's output
  uint32_t stream;
  int64_t counter;  // position or step
  int32_t rounds;
  float weight;  // of `block`
};

struct Workspace {
  Key* node_tickets;     // [batch, width]
  Key* row_tickets;      // [batch]
  Key* draw_tickets;     // [batch]
  Key* drawn;            // [batch]
  Job* jobs;             // [batch]
  Node* nodes;           // [batch, width]
  Round* rounds;         // [batch, width]
  int32_t* stands;       // [batch, width], of `typical`
  Scanned* scanned;      // [batch, width, 1 or 2, slices]
  int32_t* inverse_map;  // [vocab], draft id + 1 of each target id, where there is a map
};

// Everything the kernels are given.
struct Arguments {
  RejectionSampleParams params;
  LogitRows target;
  LogitRows draft;  // logits are null where the draft is one-hot
  Workspace space;
  Slices target_slices, draft_slices;  // of equal count

  __host__ __device__ bool has_draft() const { return draft.logits != nullptr; }
};

// Past the first cache, which may hold what was there before another block wrote.
__device__ inline Node load_node(const Arguments& a, int64_t b, int64_t slot) {
  constexpr int kWords = sizeof(Node) / 16;
  const auto* from =
      reinterpret_cast<const uint4*>(a.space.nodes + b * a.params.window.width + slot);
  uint4 words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldcg(from + i);
  Node node;
  std::memcpy(static_cast<void*>(&node), words, sizeof(Node));
  return node;
}

// ---- the window

SPECDEC_INLINE int64_t num_nodes(const WindowArrays& window, int64_t b) {
  return min(max(int64_t(window.num_nodes[b]), int64_t(0)), window.width);
}

// The next child of slot after `previous`, or -1. All lanes of a warp call together.
__device__ inline int64_t next_child(const WindowArrays& window, int64_t b, int64_t slot,
                                     int64_t previous) {
  const int32_t* parents = window.parents + b * window.width;
  const int64_t nodes = num_nodes(window, b);
  for (int64_t start = max(previous, slot) + 1; start < nodes; start += 32) {
    const int64_t child = start + threadIdx.x % 32;
    const unsigned lanes = __ballot_sync(kAllLanes, child < nodes && parents[child] == slot);
    if (lanes != 0) return start + __ffs(static_cast<int>(lanes)) - 1;
  }
  return -1;
}

SPECDEC_INLINE int64_t token_at(const WindowArrays& window, int64_t b, int64_t slot) {
  return window.draft_token_ids[b * window.width + slot];
}

__device__ inline int64_t child_with_token(const WindowArrays& window, int64_t b, int64_t slot,
                                           int64_t token) {
  int64_t child = next_child(window, b, slot, slot);
  while (child >= 0 && token_at(window, b, child) != token)
    child = next_child(window, b, slot, child);
  return child;
}

SPECDEC_INLINE int64_t depth_of(const WindowArrays& window, int64_t b, int64_t slot) {
  int64_t depth = 0;
  for (int64_t at = slot; at > 0; at = parent_of(window.parents + b * window.width, at)) ++depth;
  return depth;
}

// ---- the result: one thread writes, all count

class AcceptanceWriter {
 public:
  __device__ AcceptanceWriter(const RejectionSampleParams& p, int64_t b)
      : arrays_(p.acceptance), width_(p.window.width), b_(b) {}

  __device__ void append(int64_t slot, int64_t token, int32_t status) {
    if (threadIdx.x == 0) {
      arrays_.path[b_ * width_ + length_] = static_cast<int32_t>(slot);
      arrays_.output_token_ids[b_ * width_ + length_] = token;
    }
    status_ |= status;
    ++length_;
  }
  __device__ int64_t length() const { return length_; }
  __device__ void finish() {
    for (int64_t i = length_ + threadIdx.x; i < width_; i += kThreads) {
      arrays_.path[b_ * width_ + i] = -1;
      arrays_.output_token_ids[b_ * width_ + i] = -1;
    }
    if (threadIdx.x != 0) return;
    arrays_.num_accepted[b_] = length_ > 0 ? static_cast<int32_t>(length_ - 1) : 0;
    arrays_.status[b_] = status_;
  }

 private:
  const AcceptanceArrays& arrays_;
  int64_t width_, b_;
  int64_t length_ = 0;
  int32_t status_ = kRowOk;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
