// Drafts from a SuffixTree.
#include <algorithm>
#include <cmath>

#include "suffix_tree/suffix_tree.h"

namespace specdec {
namespace {

constexpr double kRounding = 1e-9;

}  // namespace

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

// Grows a draft by the likeliest node first; a chain takes the likeliest child alone.
class SuffixTree::Growth {
 public:
  Growth(const SuffixTree& tree, const SuffixDraftOptions& options)
      : tree_(tree), options_(options) {}

  // Gives up, with a score below `needed`, when more than that cannot come out: all further nodes
  // are at most as likely as the next one.
  const SuffixDraft& run(const Place& start, int64_t within, int64_t most, double needed) {
    open_.clear();
    draft_.tokens.clear();
    draft_.parents.clear();
    draft_.probs.clear();
    draft_.score = 0.0;
    draft_.match_length = start.depth;
    put({chance(start.depth), 1.0, 0, -1, start.depth, kNoBlock, true, start});
    for (int64_t left = most; !open_.empty() && left > 0;
         left = most - int64_t(draft_.tokens.size())) {
      const double prob = open_.front().prob;
      if (draft_.score + prob * double(left) < needed - kRounding) break;
      if (most - left >= within && prob < options_.min_prob_beyond) break;
      std::pop_heap(open_.begin(), open_.end(), later);
      const Branch branch = open_.back();
      open_.pop_back();
      if (branch.place.depth < branch.place.end) {
        add(branch);
      } else if (!tree_.is_leaf(branch.place)) {
        put_children(branch);
      } else if (branch.place.depth == tree_.max_depth_) {
        put_further(branch);
      } else {
        put_again(branch);
      }
    }
    return draft_;
  }

  // That the token behind a match is right if all earlier continuations agree.
  double chance(int match) const {
    const auto& chances = options_.chances;
    return chances.empty() ? 1.0 : chances[std::min<std::size_t>(match, chances.size()) - 1];
  }

 private:
  struct Branch {
    double prob;
    double share;  // of the continuations of the match
    int64_t rank;  // when it was put
    int32_t parent;
    int match;       // tokens, the drafted ones among them
    uint32_t first;  // position of the first drafted token, when it is known
    bool matched;    // the place's n-gram begins with the match
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

  void add(const Branch& branch) {
    const int32_t token = tree_.blocks_.at(branch.place.position)[branch.place.depth];
    if (token == kEnd) return;
    draft_.tokens.push_back(token);
    draft_.parents.push_back(branch.parent);
    draft_.probs.push_back(branch.prob);
    draft_.score += branch.prob;
    const auto& stops = options_.stop_tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) return;
    Branch below = branch;
    below.parent = static_cast<int32_t>(draft_.tokens.size()) - 1;
    below.prob *= chance(++below.match);
    ++below.place.depth;
    put(below);
  }

  void put_children(const Branch& branch) {
    const ChildList& list = tree_.nodes_[branch.place.child].children;
    const Child* children = tree_.lists_.begin(list);
    for (uint32_t i = 0; i < list.size && i <= options_.max_tokens; ++i) {
      const double share = double(children[i].count) / double(branch.place.count);
      if (branch.share * share < options_.min_prob) return;
      if (children[i].token == kEnd) continue;
      Branch below = branch;
      below.prob *= share;
      below.share *= share;
      tree_.enter(below.place, children[i]);
      put(below);
      if (!options_.tree) return;
    }
  }

  // Where the tree is cut: an n-gram that occurred once goes on as its text does; of others the
  // latter half says what follows.
  void put_further(const Branch& branch) {
    Branch below = branch;
    Place& place = below.place;
    const int length = tree_.max_depth_ / 2, skipped = tree_.max_depth_ - length;
    if (place.count == 1) {
      below.first = first_of(branch);
      below.matched = false;
      place.position = tree_.blocks_.forward(place.position, skipped);
      place.depth = length;
      place.end = tree_.readable(place.position);
      if (place.end > length) return put(below);
      return put_again(below);
    }
    const int32_t* ngram = tree_.blocks_.at(place.position) + skipped;
    below.first = kNoBlock;
    below.matched = false;
    place = tree_.root();
    if (tree_.walk(place, ngram, length) && tree_.goes_on(place)) put(below);
  }

  // Where a text ends that is its own context, it goes on as the draft began: periodically.
  void put_again(const Branch& branch) {
    Branch below = branch;
    below.first = first_of(branch);
    if (!tree_.eager_ || below.first == kNoBlock) return;
    below.matched = false;
    below.place.position = below.first;
    below.place.depth = 0;
    below.place.end = tree_.readable(below.first);
    put(below);
  }

  uint32_t first_of(const Branch& branch) const {
    if (!branch.matched) return branch.first;
    return tree_.blocks_.forward(branch.place.position, draft_.match_length);
  }

  const SuffixTree& tree_;
  const SuffixDraftOptions& options_;
  SuffixDraft draft_;
  int64_t rank_ = 0;
  std::vector<Branch> open_;
};

// A draft's score is at most that of a chain that all continuations agree on, which shorter matches
// make less likely: from some length down, none can win.
SuffixDraft SuffixTree::draft(const int32_t* context, int64_t length,
                              const SuffixDraftOptions& options) const {
  const auto allowed = [&](int n) {
    const double tokens = std::floor(n * options.factor + options.offset + kRounding);
    return static_cast<int64_t>(std::clamp(tokens, 0.0, double(options.max_tokens)));
  };
  SuffixDraft best;
  Growth growth(*this, options);
  const auto best_score = [&](int n, int64_t tokens) {
    double sum = 0.0, prob = 1.0;
    for (int64_t i = 0; i < tokens; ++i) sum += prob *= growth.chance(n + static_cast<int>(i));
    return sum;
  };
  for (int n = longest_match(context, length); n >= 1; --n) {
    const int64_t within = allowed(n);
    const int64_t most = options.min_prob_beyond > 1.0 ? within : options.max_tokens;
    if (best_score(n, most) < best.score - kRounding) break;
    Place place = root();
    if (!walk(place, context + length - n, n)) continue;  // did not enter yet
    const SuffixDraft& draft = growth.run(place, within, most, best.score);
    if (draft.score > best.score) best = draft;
  }
  return best;
}

}  // namespace specdec
