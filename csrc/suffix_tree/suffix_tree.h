#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "suffix_tree/children.h"
#include "suffix_tree/texts.h"

namespace specdec {

constexpr int kMaxSuffixDepth = 1024;
int check_suffix_depth(int max_depth);  // returns it, or throws std::invalid_argument

// What bounds a draft, in arctic-inference's and vLLM's terms: at most max_tokens nodes and at most
// factor * match length + offset; nothing of a lower share of what followed the match than
// min_prob, nor anything behind a stop token.
//
// A node's probability is its share times, for it and each node above, the chance that a text goes
// on at all as it did before: chances[n - 1] behind a match of n tokens (drafted ones count), the
// last one for longer matches; ascending, or empty for certainty. Nodes of at least min_prob_beyond
// are not bound by factor and offset.
struct SuffixDraftOptions {
  int64_t max_tokens;
  double factor = 1.0;
  double offset = 0.0;
  double min_prob = 0.1;
  bool tree = false;
  std::vector<int32_t> stop_tokens = {};
  std::vector<double> chances = {};
  double min_prob_beyond = 2.0;
};

// tokens and parents of a tree (-1 hangs below the context's last token), in the order in which it
// grew: any first part of it is a tree as well. score: the sum of `probs`.
struct SuffixDraft {
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
  std::vector<double> probs;  // of the path from the context's last token
  double score = 0.0;
  int match_length = 0;
};

// A tree of the suffixes of texts, cut at max_depth tokens, which counts how often each n-gram
// occurs.
//
// Path compressed: a node stands for an n-gram with several continuations, an edge is read from a
// text that contains it. Leaves are no nodes but entries in their parents' lists, so a token that
// no text held before costs 4 bytes and one entry of 12; text that repeats costs its tokens alone.
//
// Texts leave in the order in which they came. Every edge is read from the youngest text that
// passes, so that nothing refers to the oldest one when what it alone held is gone.
//
// A suffix enters once max_depth tokens follow its beginning, or its text is closed: then the tree
// counts all n-grams of closed texts. In a tree that is `eager` it enters as soon as it occurs for
// the first time or parts from its earlier occurrences: what is not in it are the suffixes that are
// repetitions so far, the text's own end among them. Such a tree holds a single text.
//
// A new token takes one to three walks from the root, each along the branchings of one suffix; a
// draft O(log max_depth) walks to find the longest match, and one for each length that is tried.
class SuffixTree {
 public:
  explicit SuffixTree(int max_depth, bool eager = false);

  uint32_t open();  // a new text's number: they count up, modulo 2^32
  void extend(uint32_t text, const int32_t* tokens, int64_t count);
  void close(uint32_t text);
  void remove_oldest();
  bool holds(uint32_t text) const { return text - oldest_ < texts_.size(); }
  uint32_t oldest() const { return oldest_; }

  int max_depth() const { return max_depth_; }
  int64_t num_texts() const { return static_cast<int64_t>(texts_.size()); }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t length(uint32_t text) const;
  std::vector<int32_t> tokens(uint32_t text) const;
  int64_t bytes() const;

  // How often an n-gram of 1 to max_depth tokens occurs, among the suffixes that are in the tree.
  int64_t count(const int32_t* ngram, int length) const;
  // Its continuations with their counts, in order; kEnd stands for the end of a text.
  std::vector<std::pair<int32_t, int64_t>> continuations(const int32_t* ngram, int length) const;
  // The longest suffix of `context` that goes on somewhere, at most max_depth - 1 tokens. One may
  // be missed whose own suffixes did not enter yet, at the end of a text that is open.
  int longest_match(const int32_t* context, int64_t length) const;
  // The draft with the best score among those of all match lengths, of the longer match if equal.
  // It may be deeper than the tree: behind an n-gram of max_depth tokens comes what followed in the
  // text, if it occurred once, else what followed the latter half of it. In an eager tree, whose
  // text the context is, a draft that reaches the end of the text begins again.
  SuffixDraft draft(const int32_t* context, int64_t length,
                    const SuffixDraftOptions& options) const;

 private:
  struct Node {
    uint32_t position;  // of an occurrence
    uint32_t depth;     // tokens from the root; a free node's successor
    ChildList children;
  };
  // A place in the tree: `depth` tokens from the root, on the edge towards `child`, or at its end.
  struct Place {
    uint32_t child;
    uint32_t position;
    int depth;
    int end;  // the edge's depth
    int64_t count;
  };
  struct Sequence {
    Text text;
    uint32_t entering = kNoBlock;  // position of the first suffix that is not in the tree
    int64_t entered = 0;           // suffixes in the tree
    bool closed = false;
    Place repeated = {};  // in an eager tree: where the suffix `entering` ends
  };
  class Growth;

  Place root() const { return {0, 0, 0, 0, 0}; }
  bool is_leaf(const Place& place) const { return (place.child & kLeaf) != 0; }
  int edge_end(uint32_t child) const;
  uint32_t position_of(uint32_t child) const {
    return child & kLeaf ? child & ~kLeaf : nodes_[child].position;
  }
  int readable(uint32_t position) const;
  bool goes_on(const Place& place) const;
  bool step(Place& place, int32_t token) const;
  void enter(Place& place, const Child& child) const;
  bool walk(Place& place, const int32_t* tokens, int count) const;
  Place find(uint32_t position, int length) const;

  void push(Sequence& sequence, uint32_t number, int32_t token);
  void enter_all(Sequence& sequence);
  void enter_complete(Sequence& sequence);
  void enter_new(Sequence& sequence, int32_t token);
  void enter_next(Sequence& sequence);
  void insert(uint32_t position);
  uint32_t pass(uint32_t node, int64_t index, uint32_t position);
  uint32_t younger(uint32_t position, uint32_t other) const;
  void split(uint32_t parent, int64_t index, int depth, uint32_t position);
  void remove(uint32_t position);
  void join(uint32_t parent, int32_t token, uint32_t node);
  uint32_t new_node(uint32_t position, int depth);

  int max_depth_;
  bool eager_;
  uint32_t oldest_ = 0;
  int64_t num_tokens_ = 0;
  std::deque<Sequence> texts_;
  TokenBlocks blocks_;
  ChildLists lists_;
  Pool<Node> nodes_;
  uint32_t free_node_ = 0;  // 0, the root, when there is none
};

}  // namespace specdec
