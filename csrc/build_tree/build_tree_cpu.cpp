#include "build_tree/build_tree.h"

#include "common/scratch.h"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kTreeScratch = 0;  // slot of thread_scratch
constexpr int32_t kRoot = -1, kDropped = -2, kPadding = -2;

struct Candidate {
  int64_t token;
  int32_t parent;  // the first of equal candidates
  int32_t joined;  // itself, the earlier candidate that it equals, or kDropped
  int32_t slot;
  float score;
};

// Candidates by parent and token: open addressing, at most half full.
class CandidateTable {
 public:
  CandidateTable(int32_t* cells, int64_t size) : cells_(cells), mask_(uint64_t(size - 1)) {
    for (int64_t i = 0; i < size; ++i) cells_[i] = -1;
  }
  // The smallest power of two that leaves half of the cells empty.
  static int64_t size_for(int64_t candidates) {
    int64_t size = 2;
    while (size < 2 * candidates) size *= 2;
    return size;
  }
  // The candidate equal to all[i] that came first, maybe i itself.
  int32_t first_equal(const Candidate* all, int32_t i) {
    const Candidate& own = all[i];
    uint64_t hash = uint64_t(own.token) * 0x9e3779b97f4a7c15u + uint32_t(own.parent);
    hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
    for (uint64_t at = hash >> 32 & mask_;; at = (at + 1) & mask_) {
      const int32_t other = cells_[at];
      if (other < 0) return cells_[at] = i;
      if (all[other].token == own.token && all[other].parent == own.parent) return other;
    }
  }

 private:
  int32_t* cells_;
  uint64_t mask_;
};

// Drops unusable candidates and joins equal ones: the first stays, with the best score.
void join_equal(const BuildTreeParams& p, int64_t b, Candidate* all, CandidateTable table) {
  const int64_t begin = b * p.candidates;
  for (int32_t i = 0; i < p.candidates; ++i) {
    const int32_t parent = p.parents[begin + i];
    const bool named = parent == kRoot || (parent >= 0 && parent < i);
    all[i].token = p.token_ids[begin + i];
    all[i].score = p.scores[begin + i];
    all[i].parent = named && parent >= 0 ? all[parent].joined : named ? kRoot : kDropped;
    all[i].joined = kDropped;
    const bool usable = all[i].token >= 0 && all[i].score > -__builtin_inff();
    if (!usable || all[i].parent == kDropped) continue;
    Candidate& first = all[all[i].joined = table.first_equal(all, i)];
    if (all[i].score > first.score) first.score = all[i].score;
  }
}

// Limited to its parent's score, no candidate ranks before its parent.
void rank(Candidate* all, int64_t count, TopKeys& best) {
  for (int32_t i = 0; i < count; ++i) {
    Candidate& own = all[i];
    if (own.joined != i) continue;
    if (own.parent >= 0 && own.score > all[own.parent].score) own.score = all[own.parent].score;
    best.offer(to_key(own.score, i));
  }
  best.sort();
}

// One row of the window.
struct WindowRow {
  int64_t* token_ids;
  int32_t* parents;
  uint64_t* mask;
  int32_t* depth;
  int64_t words;

  WindowRow(const BuildTreeParams& p, int64_t b)
      : token_ids(p.draft_token_ids + b * p.width),
        parents(p.window_parents + b * p.width),
        mask(p.tree_mask + b * p.width * ((p.width + 63) / 64)),
        depth(p.depth + b * p.width),
        words((p.width + 63) / 64) {}

  void set(int64_t slot, int64_t token, int32_t parent) {
    token_ids[slot] = token;
    parents[slot] = parent;
    depth[slot] = parent >= 0 ? depth[parent] + 1 : 0;
    uint64_t* own = mask + slot * words;
    for (int64_t w = 0; w < words; ++w) own[w] = parent >= 0 ? mask[parent * words + w] : 0;
    own[slot / 64] |= uint64_t(1) << (slot % 64);
  }
};

bool build_row(const BuildTreeParams& p, int64_t b) {
  const int64_t wanted = p.max_nodes[b] < p.width ? p.max_nodes[b] : p.width;
  const int64_t size = wanted > 0 ? wanted : 0;
  const int64_t cells = CandidateTable::size_for(p.candidates);
  const int64_t drafted = size > 1 ? size - 1 : 0;
  void* memory =
      thread_scratch(kTreeScratch, size_t(p.candidates) * sizeof(Candidate) +
                                       size_t(drafted) * sizeof(uint64_t) + size_t(cells) * 4);
  if (memory == nullptr) return false;
  auto* all = static_cast<Candidate*>(memory);
  auto* keys = reinterpret_cast<uint64_t*>(all + p.candidates);
  TopKeys best(keys, drafted);
  if (drafted > 0) {
    join_equal(p, b, all, CandidateTable(reinterpret_cast<int32_t*>(keys + drafted), cells));
    rank(all, p.candidates, best);
  }
  const int64_t used = size > 0 ? best.size() + 1 : 0;
  const int64_t root = p.root_token_ids[b];
  p.num_nodes[b] = int32_t(used);
  WindowRow row(p, b);
  row.set(0, root, used > 0 ? kRoot : kPadding);
  for (int64_t slot = 1; slot < used; ++slot) {
    Candidate& own = all[key_index(best[slot - 1])];
    own.slot = int32_t(slot);
    row.set(slot, own.token, own.parent >= 0 ? all[own.parent].slot : 0);
  }
  for (int64_t slot = used > 1 ? used : 1; slot < p.width; ++slot) row.set(slot, root, kPadding);
  return true;
}

}  // namespace

Status build_tree(const BuildTreeParams& p) {
  if (p.candidates > INT32_MAX || p.width > INT32_MAX) return Status::unsupported_shape;
  int failed = 0;
#pragma omp parallel for num_threads(p.num_threads) \
    schedule(dynamic) if (p.batch > 1 && p.batch * p.candidates > 4096) reduction(+ : failed)
  for (int64_t b = 0; b < p.batch; ++b) failed += !build_row(p, b);
  return failed ? Status::out_of_memory : Status::ok;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
