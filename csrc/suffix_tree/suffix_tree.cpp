#include "suffix_tree/suffix_tree.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace specdec {
namespace {

constexpr uint32_t kRoot = 0;

}  // namespace

int check_suffix_depth(int max_depth) {
  if (max_depth < 2 || max_depth > kMaxSuffixDepth)
    throw std::invalid_argument("SuffixTree: expected max_depth from 2 to " +
                                std::to_string(kMaxSuffixDepth) + ", got " +
                                std::to_string(max_depth));
  return max_depth;
}

SuffixTree::SuffixTree(int max_depth, bool eager)
    : max_depth_(check_suffix_depth(max_depth)), eager_(eager), blocks_(max_depth) {
  nodes_.add(1);
  nodes_[kRoot] = {0, 0, lists_.make()};
}

uint32_t SuffixTree::open() {
  if (eager_ && !texts_.empty())
    throw std::logic_error("SuffixTree: an eager tree holds a single text");
  texts_.emplace_back();
  return oldest_ + static_cast<uint32_t>(texts_.size()) - 1;
}

void SuffixTree::extend(uint32_t text, const int32_t* tokens, int64_t count) {
  if (!holds(text)) throw std::out_of_range("SuffixTree: no such text");
  Sequence& sequence = texts_[text - oldest_];
  if (sequence.closed) throw std::invalid_argument("SuffixTree: the text is closed");
  if (std::any_of(tokens, tokens + count, [](int32_t token) { return token < 0; }))
    throw std::invalid_argument("SuffixTree: expected tokens of at least 0");
  for (int64_t i = 0; i < count; ++i) push(sequence, text, tokens[i]);
}

void SuffixTree::close(uint32_t text) {
  if (!holds(text)) throw std::out_of_range("SuffixTree: no such text");
  Sequence& sequence = texts_[text - oldest_];
  if (sequence.closed) return;
  sequence.closed = true;
  push(sequence, text, kEnd);
}

void SuffixTree::push(Sequence& sequence, uint32_t number, int32_t token) {
  blocks_.push(sequence.text, token, number);
  if (token != kEnd) ++num_tokens_;
  if (sequence.entering == kNoBlock)
    sequence.entering = sequence.entered == 0 ? blocks_.begin_of(sequence.text.first)
                                              : blocks_.begin_of(sequence.text.last);
  if (sequence.closed) {
    enter_all(sequence);
  } else if (eager_) {
    enter_new(sequence, token);
  } else {
    enter_complete(sequence);
  }
}

// kEnd makes no suffix of its own.
void SuffixTree::enter_all(Sequence& sequence) {
  while (sequence.entered < sequence.text.length - 1) enter_next(sequence);
}

void SuffixTree::enter_complete(Sequence& sequence) {
  while (sequence.entered + max_depth_ <= sequence.text.length) enter_next(sequence);
}

// With `token`, the text's last one: the longest suffix that was a repetition stays one, or it
// enters and the next shorter one is tried.
void SuffixTree::enter_new(Sequence& sequence, int32_t token) {
  Place& at = sequence.repeated;
  while (sequence.entered < sequence.text.length) {
    const bool repeats = step(at, token);
    if (repeats && at.depth < max_depth_) return;
    enter_next(sequence);
    if (sequence.entered == sequence.text.length) break;
    const int64_t length = sequence.text.length - sequence.entered - (repeats ? 0 : 1);
    at = find(sequence.entering, static_cast<int>(length));
    if (repeats) return;
  }
  at = root();
}

void SuffixTree::enter_next(Sequence& sequence) {
  insert(sequence.entering);
  ++sequence.entered;
  sequence.entering = blocks_.next(sequence.entering);
}

int SuffixTree::readable(uint32_t position) const {
  return std::min(blocks_.available(position), max_depth_);
}

int SuffixTree::edge_end(uint32_t child) const {
  return child & kLeaf ? readable(child & ~kLeaf) : static_cast<int>(nodes_[child].depth);
}

void SuffixTree::enter(Place& place, const Child& child) const {
  place = {child.child, position_of(child.child), place.depth, edge_end(child.child), child.count};
}

// From a place to the one behind `token`; false, and no change of depth, when there is none. Leaves
// of an open text grow, so their end is read anew.
bool SuffixTree::step(Place& place, int32_t token) const {
  if (is_leaf(place)) place.end = readable(place.position);
  if (place.depth == place.end) {
    if (is_leaf(place)) return false;
    const ChildList& list = nodes_[place.child].children;
    const int64_t index = lists_.find(list, token);
    if (index < 0) return false;
    enter(place, lists_.begin(list)[index]);
  } else if (blocks_.at(place.position)[place.depth] != token) {
    return false;
  }
  ++place.depth;
  return true;
}

bool SuffixTree::walk(Place& place, const int32_t* tokens, int count) const {
  while (place.depth < count) {
    if (!step(place, tokens[place.depth])) return false;
    const int known = std::min(place.end, count);
    const int32_t* label = blocks_.at(place.position);
    while (place.depth < known && label[place.depth] == tokens[place.depth]) ++place.depth;
    if (place.depth < known) return false;
  }
  return true;
}

// The place of the first `length` tokens at a position, which must be in the tree.
SuffixTree::Place SuffixTree::find(uint32_t position, int length) const {
  const int32_t* tokens = blocks_.at(position);
  Place place = root();
  while (place.depth < length) {
    const ChildList& list = nodes_[place.child].children;
    enter(place, lists_.begin(list)[lists_.find(list, tokens[place.depth])]);
    place.depth = std::min(place.end, length);
  }
  return place;
}

// Whichever belongs to the younger text, `position` if both do.
uint32_t SuffixTree::younger(uint32_t position, uint32_t other) const {
  const uint32_t age = blocks_.order(position) - oldest_,
                 other_age = blocks_.order(other) - oldest_;
  return age >= other_age ? position : other;
}

uint32_t SuffixTree::new_node(uint32_t position, int depth) {
  uint32_t node = free_node_;
  if (node != kRoot) {
    free_node_ = nodes_[node].depth;
  } else {
    node = static_cast<uint32_t>(nodes_.add(1));
  }
  nodes_[node] = {position, static_cast<uint32_t>(depth), lists_.make()};
  return node;
}

void SuffixTree::insert(uint32_t position) {
  const int32_t* tokens = blocks_.at(position);
  const int length = readable(position);
  uint32_t node = kRoot;
  int depth = 0;
  while (true) {
    const int64_t index = lists_.find(nodes_[node].children, tokens[depth]);
    if (index < 0) {
      lists_.add(nodes_[node].children, {tokens[depth], 1, position | kLeaf}, node != kRoot);
      return;
    }
    const uint32_t child = lists_.begin(nodes_[node].children)[index].child;
    const int32_t* label = blocks_.at(position_of(child));
    const int shared = std::min(edge_end(child), length);
    while (depth < shared && label[depth] == tokens[depth]) ++depth;
    if (depth < shared) split(node, index, depth, position);
    const uint32_t next = pass(node, index, position);
    if (next & kLeaf) return;
    node = next;
  }
}

// Counts a suffix that passes a child, which is returned.
uint32_t SuffixTree::pass(uint32_t node, int64_t index, uint32_t position) {
  Child& entry = lists_.begin(nodes_[node].children)[index];
  const uint32_t child = entry.child;
  const uint32_t occurrence = younger(position, position_of(child));
  if (child & kLeaf) {
    entry.child = occurrence | kLeaf;
  } else {
    nodes_[child].position = occurrence;
  }
  lists_.increment(nodes_[node].children, index, node != kRoot);
  return child;
}

// Puts a node into the edge of a child, at `depth`; it takes over the child, and nothing is
// counted.
void SuffixTree::split(uint32_t parent, int64_t index, int depth, uint32_t position) {
  const Child below = lists_.begin(nodes_[parent].children)[index];
  const uint32_t occurrence = position_of(below.child);
  const uint32_t node = new_node(younger(position, occurrence), depth);
  lists_.add(nodes_[node].children, {blocks_.at(occurrence)[depth], below.count, below.child},
             true);
  lists_.begin(nodes_[parent].children)[index].child = node;
}

void SuffixTree::remove_oldest() {
  if (texts_.empty()) throw std::out_of_range("SuffixTree: there is no text");
  Sequence& sequence = texts_.front();
  uint32_t position = sequence.entered > 0 ? blocks_.begin_of(sequence.text.first) : kNoBlock;
  for (int64_t i = 0; i < sequence.entered; ++i) {
    remove(position);
    position = blocks_.next(position);
  }
  num_tokens_ -= length(oldest_);
  blocks_.release(sequence.text);
  texts_.pop_front();
  ++oldest_;
}

void SuffixTree::remove(uint32_t position) {
  const int32_t* tokens = blocks_.at(position);
  uint32_t parent = kRoot, node = kRoot;
  int depth = 0, parent_depth = 0;
  while (true) {
    ChildList& list = nodes_[node].children;
    const int64_t index = lists_.find(list, tokens[depth]);
    const uint32_t next = lists_.begin(list)[index].child;
    lists_.decrement(list, index, node != kRoot);
    if (next & kLeaf) break;
    parent = node;
    parent_depth = depth;
    node = next;
    depth = static_cast<int>(nodes_[node].depth);
  }
  if (node != kRoot && nodes_[node].children.size == 1) join(parent, tokens[parent_depth], node);
}

// Takes out a node with a single child.
void SuffixTree::join(uint32_t parent, int32_t token, uint32_t node) {
  const ChildList& list = nodes_[parent].children;
  lists_.begin(list)[lists_.find(list, token)].child = lists_.begin(nodes_[node].children)->child;
  lists_.release(nodes_[node].children);
  nodes_[node].depth = free_node_;
  free_node_ = node;
}

int64_t SuffixTree::length(uint32_t text) const {
  const Sequence& sequence = texts_.at(text - oldest_);
  return sequence.text.length - (sequence.closed ? 1 : 0);
}

std::vector<int32_t> SuffixTree::tokens(uint32_t text) const {
  std::vector<int32_t> tokens(length(text));
  uint32_t position = tokens.empty() ? 0 : blocks_.begin_of(texts_[text - oldest_].text.first);
  for (int32_t& token : tokens) {
    token = *blocks_.at(position);
    position = blocks_.next(position);
  }
  return tokens;
}

int64_t SuffixTree::bytes() const {
  return blocks_.bytes() + lists_.bytes() + nodes_.bytes() + texts_.size() * sizeof(Sequence);
}

int64_t SuffixTree::count(const int32_t* ngram, int length) const {
  Place place = root();
  return length <= max_depth_ && walk(place, ngram, length) ? place.count : 0;
}

std::vector<std::pair<int32_t, int64_t>> SuffixTree::continuations(const int32_t* ngram,
                                                                   int length) const {
  Place place = root();
  if (length > max_depth_ || !walk(place, ngram, length)) return {};
  if (place.depth < place.end) return {{blocks_.at(place.position)[place.depth], place.count}};
  if (is_leaf(place)) return {};
  const ChildList& list = nodes_[place.child].children;
  std::vector<std::pair<int32_t, int64_t>> found;
  for (uint32_t i = 0; i < list.size; ++i)
    found.emplace_back(lists_.begin(list)[i].token, lists_.begin(list)[i].count);
  return found;
}

}  // namespace specdec
