#include "ngram_index/ngram_index.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "ngram_lookup/ngram_lookup.h"

namespace specdec {
namespace {

constexpr uint32_t kRoot = 0, kNone = 0;
constexpr int64_t kCompared = 64;  // tokens
constexpr int64_t kPrompt = 1024;  // tokens; what comes in smaller portions is a step
constexpr std::size_t kMaxCount = std::numeric_limits<uint32_t>::max();

}  // namespace

NgramText::NgramText(const NgramIndexOptions& options) : options_(options) { clear(); }

void NgramText::clear() {
  text_.clear();
  nodes_.assign(1, Node{0, kRoot, kNone, 0, kNone});
  older_.assign(1, Older{0, kNone});
  table_.assign(16, kNone);
  in_table_ = inserted_ = 0;
}

bool NgramText::begins(const int32_t* tokens, int64_t count) const {
  const int64_t from = std::max<int64_t>(size() - kCompared, 0);
  return count >= size() && std::equal(text_.begin() + from, text_.end(), tokens + from);
}

int64_t NgramText::bytes() const {
  return text_.capacity() * sizeof(int32_t) + nodes_.capacity() * sizeof(Node) +
         older_.capacity() * sizeof(Older) + table_.capacity() * sizeof(uint32_t);
}

void NgramText::append(const int32_t* tokens, int64_t count) {
  if (text_.size() + count >= kMaxCount) throw std::length_error("NgramIndex: text too long");
  text_.insert(text_.end(), tokens, tokens + count);
  for (; inserted_ + options_.k < size(); ++inserted_) insert(static_cast<uint32_t>(inserted_));
  if (count >= kPrompt && 2 * count > size()) make_room();
}

// For half as much again, so that a prompt pays for it and not one of the steps behind it.
void NgramText::make_room() {
  text_.reserve(text_.size() / 2 * 3);
  nodes_.reserve(nodes_.size() / 2 * 3);
  older_.reserve(older_.size() / 2 * 3);
  if (3 * std::size_t(in_table_) > table_.size()) grow_table();
}

void NgramText::insert(uint32_t end) {
  uint32_t node = kRoot;
  for (int64_t depth = 0; depth < options_.max_n && depth <= end; ++depth) {
    const uint32_t next = find(node, text_[end - depth]);
    if (next == kNone) return add(node, text_[end - depth], end);
    node = next;
    const uint32_t other = nodes_[node].latest;
    if (is_leaf(node, depth + 1) && other > depth) add(node, text_[other - depth - 1], other);
    if (depth + 1 >= options_.min_n) remember(node, end);
  }
}

// Puts `end` before the other ends of a node, each of which moves one place back, up to the one
// with the same continuation, which goes, or the last one when there are too many.
void NgramText::remember(uint32_t node, uint32_t end) {
  uint32_t moved = end, last = kNone;
  std::swap(nodes_[node].latest, moved);
  uint32_t next = nodes_[node].older;
  for (int64_t rank = 1; rank < options_.num_matches && !same_draft(moved, end); ++rank) {
    if (next == kNone) {
      if (older_.size() >= kMaxCount) throw std::length_error("NgramIndex: text too long");
      older_.push_back({moved, kNone});
      const uint32_t fresh = static_cast<uint32_t>(older_.size() - 1);
      (last == kNone ? nodes_[node].older : older_[last].next) = fresh;
      return;
    }
    last = next;
    std::swap(older_[last].end, moved);
    next = older_[last].next;
  }
}

void NgramText::add(uint32_t parent, int32_t token, uint32_t end) {
  if (nodes_.size() >= kMaxCount) throw std::length_error("NgramIndex: text too long");
  const uint32_t fresh = static_cast<uint32_t>(nodes_.size());
  const bool first = nodes_[parent].child == kNone;
  if (!first && 2 * std::size_t(in_table_ + 1) > table_.size()) grow_table();
  nodes_.push_back({token, parent, kNone, end, kNone});
  if (first) {
    nodes_[parent].child = fresh;
  } else {
    table_[slot(parent, token)] = fresh;
    ++in_table_;
  }
}

void NgramText::grow_table() {
  std::vector<uint32_t> old(2 * table_.size(), kNone);
  old.swap(table_);
  for (uint32_t node : old)
    if (node != kNone) table_[slot(nodes_[node].parent, nodes_[node].token)] = node;
}

// Where a child is in the table, or the free place for it.
std::size_t NgramText::slot(uint32_t parent, int32_t token) const {
  uint64_t hash = (uint64_t(parent) << 32 | uint32_t(token)) * 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
  const std::size_t mask = table_.size() - 1;
  std::size_t place = hash >> 32 & mask;
  while (table_[place] != kNone &&
         (nodes_[table_[place]].parent != parent || nodes_[table_[place]].token != token))
    place = (place + 1) & mask;
  return place;
}

uint32_t NgramText::find(uint32_t parent, int32_t token) const {
  const uint32_t first = nodes_[parent].child;
  if (first == kNone || nodes_[first].token == token) return first;
  return table_[slot(parent, token)];
}

// Has one occurrence, at `latest`, and stands for all longer n-grams that end there.
bool NgramText::is_leaf(uint32_t node, int64_t depth) const {
  return depth < options_.max_n && nodes_[node].child == kNone;
}

bool NgramText::same_draft(uint32_t a, uint32_t b) const {
  const int32_t* text = text_.data() + 1;
  return std::memcmp(text + a, text + b, options_.k * sizeof(int32_t)) == 0;
}

// Tokens up to `end` that equal the text's last ones; the first `known` do.
int64_t NgramText::match_length(int64_t end, int64_t known) const {
  const int64_t limit = std::min(end + 1, options_.max_n), last = size() - 1;
  while (known < limit && text_[end - known] == text_[last - known]) ++known;
  return known;
}

class NgramText::Query {
 public:
  explicit Query(const NgramText& index)
      : index_(index), options_(index.options_), last_(index.size() - 1) {}

  NgramDrafts run() {
    find_near();
    find_path();
    for (int64_t n = options_.max_n; n >= options_.min_n && !full(); --n) take_all(n);
    return std::move(found_);
  }

 private:
  struct Match {
    int64_t end;
    int64_t length;
  };

  bool full() const { return int64_t(found_.drafts.size()) == options_.num_matches; }

  // Ends with fewer than k tokens behind them.
  void find_near() {
    const int64_t first = std::max<int64_t>(last_ - options_.k + 1, 0);
    for (int64_t end = last_ - 1; end >= first; --end) {
      const int64_t length = index_.match_length(end, 0);
      if (length >= options_.min_n) near_.push_back({end, length});
    }
  }

  // The nodes of the text's last n-grams, path_[n] for n tokens; a leaf at the end is kept apart.
  void find_path() {
    path_.push_back(kRoot);
    for (int64_t depth = 0; depth < options_.max_n && depth <= last_; ++depth) {
      const uint32_t node = index_.find(path_.back(), index_.text_[last_ - depth]);
      if (node == kNone) return;
      if (index_.is_leaf(node, depth + 1)) {
        const int64_t end = index_.nodes_[node].latest;
        leaf_ = {end, index_.match_length(end, depth + 1)};
        return;
      }
      path_.push_back(node);
    }
  }

  void take_all(int64_t n) {
    for (const Match& match : near_)
      if (match.length == n) take(match.end, n);
    if (leaf_.length == n) take(leaf_.end, n);
    if (n >= int64_t(path_.size())) return;
    const Node& node = index_.nodes_[path_[n]];
    take_unless_longer(node.latest, n);
    for (uint32_t i = node.older; i != kNone; i = index_.older_[i].next)
      take_unless_longer(index_.older_[i].end, n);
  }

  // Longer matches had their turn.
  void take_unless_longer(int64_t end, int64_t n) {
    if (index_.match_length(end, n) == n) take(end, n);
  }

  void take(int64_t end, int64_t length) {
    if (full()) return;
    std::vector<int32_t> draft(options_.k);
    const int32_t* behind = index_.text_.data() + end + 1;
    const int64_t period = last_ - end, copied = std::min(period, options_.k);
    std::copy(behind, behind + copied, draft.begin());
    for (int64_t j = copied; j < options_.k; ++j) draft[j] = draft[j - period];
    auto& drafts = found_.drafts;
    if (std::find(drafts.begin(), drafts.end(), draft) != drafts.end()) return;
    found_.length = std::max(found_.length, length);
    drafts.push_back(std::move(draft));
  }

  const NgramText& index_;
  const NgramIndexOptions& options_;
  const int64_t last_;
  std::vector<Match> near_;
  std::vector<uint32_t> path_;
  Match leaf_{0, 0};
  NgramDrafts found_;
};

NgramDrafts NgramText::lookup() const {
  if (size() < 2) return {};
  return Query(*this).run();
}

NgramIndex::NgramIndex(int64_t batch, const NgramIndexOptions& options) {
  if (batch < 0) throw std::invalid_argument("NgramIndex: expected batch of at least 0");
  if (!(1 <= options.min_n && options.min_n <= options.max_n && options.max_n <= kMaxIndexedNgram))
    throw std::invalid_argument("NgramIndex: expected 1 <= min_n <= max_n <= " +
                                std::to_string(kMaxIndexedNgram));
  if (options.k < 1 || options.k >= int64_t(kMaxCount))
    throw std::invalid_argument("NgramIndex: expected k of at least 1");
  if (options.num_matches < 1 || options.num_matches > kMaxNgramMatches)
    throw std::invalid_argument("NgramIndex: expected num_matches from 1 to " +
                                std::to_string(kMaxNgramMatches));
  rows_.assign(batch, NgramText(options));
}

int64_t NgramIndex::size(int64_t row) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rows_.at(row).size();
}

int64_t NgramIndex::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  for (const NgramText& row : rows_) sum += row.bytes();
  return sum;
}

void NgramIndex::extend(int64_t row, const int32_t* tokens, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  rows_.at(row).append(tokens, count);
}

void NgramIndex::reset(int64_t row) {
  const std::lock_guard<std::mutex> lock(mutex_);
  rows_.at(row).clear();
}

void NgramIndex::follow(const int32_t* tokens, int64_t stride, const int32_t* lens, int64_t max_len,
                        [[maybe_unused]] int num_threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::exception_ptr error;
  const auto length = [=](int64_t b) { return std::clamp<int64_t>(lens[b], 0, max_len); };
  int64_t fresh = 0;
  for (int64_t b = 0; b < batch(); ++b) fresh += std::max<int64_t>(length(b) - rows_[b].size(), 0);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (fresh > 4096)
  for (int64_t b = 0; b < batch(); ++b) {
    try {  // nothing may leave a parallel region
      NgramText& row = rows_[b];
      const int32_t* text = tokens + b * stride;
      if (!row.begins(text, length(b))) row.clear();
      row.append(text + row.size(), length(b) - row.size());
    } catch (...) {
#pragma omp critical(specdec_ngram_index)
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

std::vector<NgramDrafts> NgramIndex::lookup() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<NgramDrafts> found;
  found.reserve(rows_.size());
  for (const NgramText& row : rows_) found.push_back(row.lookup());
  return found;
}

}  // namespace specdec
