// Drafts from a SuffixTree.
#include <algorithm>
#include <cmath>

#include "suffix_tree/suffix_tree.h"

namespace specdec {

bool SuffixTree::goes_on(const Place& place) const {
  if (place.depth == place.end) return !is_leaf(place);
  return blocks_.at(place.position)[place.depth] != kEnd;
}

// What goes on for the longer suffix does so for each shorter one.
int SuffixTree::longest_match(const int32_t* context, int64_t length) const {
  const int32_t* end = context + length;
  const auto matches = [&](int n) {
    Place place = root();
    return walk(place, end - n, n) && goes_on(place);
  };
  const int limit = static_cast<int>(std::min<int64_t>(length, max_depth_ - 1));
  int most = 0, least_failing = limit + 1;
  for (int n = 1; most < limit; n = std::min(2 * n, limit)) {
    if (!matches(n)) {
      least_failing = n;
      break;
    }
    most = n;
  }
  while (least_failing - most > 1) {
    const int middle = (most + least_failing) / 2;
    (matches(middle) ? most : least_failing) = middle;
  }
  return most;
}

// Grows one draft, by the likeliest node first; a chain takes the likeliest child alone.
class SuffixTree::Growth {
 public:
  Growth(const SuffixTree& tree, const SuffixDraftOptions& options, int64_t max_tokens)
      : tree_(tree), options_(options), max_tokens_(max_tokens) {}

  SuffixDraft run(const Place& start) {
    SuffixDraft draft;
    draft.match_length = start.depth;
    put({1.0, 0, -1, start});
    while (!open_.empty() && int64_t(draft.tokens.size()) < max_tokens_) {
      std::pop_heap(open_.begin(), open_.end(), later);
      const Branch branch = open_.back();
      open_.pop_back();
      if (branch.place.depth < branch.place.end) {
        add(draft, branch);
      } else if (!tree_.is_leaf(branch.place)) {
        put_children(branch);
      }
    }
    return draft;
  }

 private:
  struct Branch {
    double prob;
    int64_t rank;  // when it was put
    int32_t parent;
    Place place;
  };

  static bool later(const Branch& a, const Branch& b) {
    return a.prob != b.prob ? a.prob < b.prob : a.rank > b.rank;
  }

  void put(Branch branch) {
    branch.rank = rank_++;
    open_.push_back(branch);
    std::push_heap(open_.begin(), open_.end(), later);
  }

  void add(SuffixDraft& draft, const Branch& branch) {
    const int32_t token = tree_.blocks_.at(branch.place.position)[branch.place.depth];
    if (token == kEnd) return;
    draft.tokens.push_back(token);
    draft.parents.push_back(branch.parent);
    draft.probs.push_back(branch.prob);
    draft.score += branch.prob;
    const auto& stops = options_.stop_tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) return;
    Branch below = branch;
    below.parent = static_cast<int32_t>(draft.tokens.size()) - 1;
    ++below.place.depth;
    put(below);
  }

  void put_children(const Branch& branch) {
    const ChildList& list = tree_.nodes_[branch.place.child].children;
    const Child* children = tree_.lists_.begin(list);
    for (uint32_t i = 0; i < list.size; ++i) {
      const double share = double(children[i].count) / double(branch.place.count);
      const double prob = branch.prob * share;
      if (prob < options_.min_prob) return;
      if (children[i].token == kEnd) continue;
      Branch below{prob, 0, branch.parent, branch.place};
      tree_.enter(below.place, children[i]);
      put(below);
      if (!options_.tree) return;
    }
  }

  const SuffixTree& tree_;
  const SuffixDraftOptions& options_;
  const int64_t max_tokens_;
  int64_t rank_ = 0;
  std::vector<Branch> open_;
};

// A draft's score is at most its number of tokens, and at most how deep it can go, as the
// probabilities of a level sum up to one. Lengths are tried from the one that could score best,
// down to where no other can win.
SuffixDraft SuffixTree::draft(const int32_t* context, int64_t length,
                              const SuffixDraftOptions& options) const {
  const int longest = longest_match(context, length);
  const auto most_tokens = [&](int n) {
    const double allowed = std::floor(n * options.factor + options.offset + 1e-6);
    return std::max<int64_t>(static_cast<int64_t>(std::min(allowed, double(options.max_tokens))),
                             0);
  };
  const auto bound = [&](int n) { return std::min<int64_t>(most_tokens(n), max_depth_ - n); };
  int peak = longest;
  while (peak > 1 && bound(peak - 1) > bound(peak)) --peak;
  SuffixDraft best;
  for (int above = peak + 1, below = peak; below >= 1 || above <= longest;) {
    const bool up = above <= longest && (below < 1 || bound(above) >= bound(below));
    const int n = up ? above++ : below--;
    if (double(bound(n)) < best.score) break;
    Place place = root();
    walk(place, context + length - n, n);
    SuffixDraft draft = Growth(*this, options, most_tokens(n)).run(place);
    if (draft.score > best.score || (draft.score == best.score && n > best.match_length))
      best = std::move(draft);
  }
  return best;
}

}  // namespace specdec
