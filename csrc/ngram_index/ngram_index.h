#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace specdec {

constexpr int64_t kMaxIndexedNgram = 64;

struct NgramIndexOptions {
  int64_t min_n;
  int64_t max_n;  // at most kMaxIndexedNgram
  int64_t k;
  int64_t num_matches;  // at most kMaxNgramMatches of ngram_lookup
};

// What ngram_lookup finds for one text, the latest of equally long matches first.
struct NgramDrafts {
  int64_t length = 0;                        // of the longest match, 0 without one
  std::vector<std::vector<int32_t>> drafts;  // k tokens each, best first
};

// One growing text, arranged so that neither a new token nor a lookup depends on its length.
//
// A tree of contexts: the node reached by the tokens w1 w2 .. wd stands for the n-gram wd .. w2 w1,
// read backwards from where it ends, and remembers the latest end of each of its num_matches most
// recent different continuations of k tokens; an older one can never be among the drafts. A node
// with a single occurrence has no children until a second one comes, and no node is deeper than
// max_n. An end enters the tree once k tokens follow it; the k - 1 ends behind those, whose drafts
// continue periodically, are compared by each lookup.
//
// A new token takes O(max_n * num_matches) comparisons of k tokens and at most max_n new nodes, a
// lookup O(max_n * (k + num_matches)) steps and one comparison of k tokens for each two candidates.
// Memory: 4 bytes per token; 20 per node, 8 to 16 more unless it is its parent's first child, and 8
// for each continuation but the first; vectors hold up to twice that. With max_n 16 it comes to 70
// bytes per token of random text, and to 250 of a document and its copy.
class NgramText {
 public:
  explicit NgramText(const NgramIndexOptions& options);

  void append(const int32_t* tokens, int64_t count);
  void clear();
  // Whether `tokens` may begin with this text: its last 64 tokens decide.
  bool begins(const int32_t* tokens, int64_t count) const;
  int64_t size() const { return static_cast<int64_t>(text_.size()); }
  int64_t bytes() const;
  NgramDrafts lookup() const;

 private:
  struct Node {
    int32_t token;    // that leads here from parent
    uint32_t parent;  // 0 is the root
    uint32_t child;   // the first one; the others are in table_
    uint32_t latest;  // where its n-gram last ended
    uint32_t older;   // list in older_, of ends with other continuations
  };
  struct Older {
    uint32_t end;
    uint32_t next;
  };

  void insert(uint32_t end);
  void remember(uint32_t node, uint32_t end);
  void add(uint32_t parent, int32_t token, uint32_t end);
  void grow_table();
  void make_room();
  std::size_t slot(uint32_t parent, int32_t token) const;
  uint32_t find(uint32_t parent, int32_t token) const;
  bool is_leaf(uint32_t node, int64_t depth) const;
  bool same_draft(uint32_t a, uint32_t b) const;
  int64_t match_length(int64_t end, int64_t known) const;
  class Query;

  NgramIndexOptions options_;
  std::vector<int32_t> text_;
  std::vector<Node> nodes_;
  std::vector<Older> older_;
  std::vector<uint32_t> table_;  // nodes by parent and token, 0 where free; its size is 2^n
  int64_t in_table_ = 0;
  int64_t inserted_ = 0;  // ends below this are in the tree
};

// The texts of a batch. Calls from several threads take turns.
class NgramIndex {
 public:
  NgramIndex(int64_t batch, const NgramIndexOptions& options);

  int64_t batch() const { return static_cast<int64_t>(rows_.size()); }
  int64_t size(int64_t row) const;
  int64_t bytes() const;
  void extend(int64_t row, const int32_t* tokens, int64_t count);
  void reset(int64_t row);
  // Appends what is new in tokens [B, stride]; a row that got shorter, or other last tokens than
  // those appended, starts afresh.
  void follow(const int32_t* tokens, int64_t stride, const int32_t* lens, int64_t max_len,
              int num_threads);
  std::vector<NgramDrafts> lookup() const;

 private:
  std::vector<NgramText> rows_;
  mutable std::mutex mutex_;
};

}  // namespace specdec
