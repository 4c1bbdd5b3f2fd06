#include "suffix_tree/suffix_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace specdec {
namespace {

constexpr int64_t kCompared = 64;                                  // tokens
constexpr int64_t kMostRequests = 1 << 20, kMostTokens = 1 << 28;  // positions take 31 bits

using Lock = std::lock_guard<std::mutex>;

}  // namespace

SuffixCache::SuffixCache(int max_depth, int64_t max_requests, int64_t max_tokens)
    : max_depth_(max_depth),
      max_requests_(max_requests),
      max_tokens_(max_tokens),
      tree_(std::make_unique<SuffixTree>(max_depth)) {
  if (max_requests < 1 || max_requests > kMostRequests)
    throw std::invalid_argument("SuffixCache: expected max_requests from 1 to " +
                                std::to_string(kMostRequests));
  if (max_tokens < 1 || max_tokens > kMostTokens)
    throw std::invalid_argument("SuffixCache: expected max_tokens from 1 to " +
                                std::to_string(kMostTokens));
}

uint32_t SuffixCache::open_in(SuffixTree& tree, int64_t max_requests) {
  if (tree.num_texts() >= max_requests) tree.remove_oldest();
  return tree.open();
}

void SuffixCache::extend_in(SuffixTree& tree, uint32_t text, const int32_t* tokens,
                            int64_t count) const {
  count = std::min(count, max_tokens_ - tree.length(text));
  while (tree.num_tokens() + count > max_tokens_ && tree.oldest() != text) tree.remove_oldest();
  count = std::min(count, max_tokens_ - tree.num_tokens());
  tree.extend(text, tokens, count);
}

SuffixCache::Ticket SuffixCache::open() {
  const Lock lock(mutex_);
  return {open_in(*tree_, max_requests_), generation_};
}

void SuffixCache::extend(const Ticket& ticket, const int32_t* tokens, int64_t count) {
  const Lock lock(mutex_);
  if (holds(ticket)) extend_in(*tree_, ticket.text, tokens, count);
}

void SuffixCache::close(const Ticket& ticket) {
  const Lock lock(mutex_);
  if (holds(ticket)) tree_->close(ticket.text);
}

SuffixDraft SuffixCache::draft(const int32_t* context, int64_t length,
                               const SuffixDraftOptions& options) const {
  const Lock lock(mutex_);
  return tree_->draft(context, length, options);
}

int64_t SuffixCache::num_requests() const {
  const Lock lock(mutex_);
  return tree_->num_texts();
}

int64_t SuffixCache::num_tokens() const {
  const Lock lock(mutex_);
  return tree_->num_tokens();
}

int64_t SuffixCache::bytes() const {
  const Lock lock(mutex_);
  return tree_->bytes();
}

void SuffixCache::clear() {
  auto empty = std::make_unique<SuffixTree>(max_depth_);
  const Lock lock(mutex_);
  tree_.swap(empty);
  ++generation_;
}

void SuffixCache::texts(std::vector<int32_t>& tokens, std::vector<int64_t>& lengths) const {
  const Lock lock(mutex_);
  tokens.reserve(tree_->num_tokens());
  for (int64_t i = 0; i < tree_->num_texts(); ++i) {
    const std::vector<int32_t> text = tree_->tokens(tree_->oldest() + static_cast<uint32_t>(i));
    tokens.insert(tokens.end(), text.begin(), text.end());
    lengths.push_back(static_cast<int64_t>(text.size()));
  }
}

void SuffixCache::load(const int32_t* tokens, int64_t count, const int64_t* lengths,
                       int64_t num_texts) {
  auto tree = std::make_unique<SuffixTree>(max_depth_);
  for (int64_t i = 0; i < num_texts; ++i) {
    if (lengths[i] < 0 || lengths[i] > count)
      throw std::invalid_argument("SuffixCache.load: expected lengths that add up to the tokens");
    const uint32_t text = open_in(*tree, max_requests_);
    extend_in(*tree, text, tokens, lengths[i]);
    tree->close(text);
    tokens += lengths[i];
    count -= lengths[i];
  }
  if (count != 0)
    throw std::invalid_argument("SuffixCache.load: expected lengths that add up to the tokens");
  const Lock lock(mutex_);
  tree_.swap(tree);
  ++generation_;
}

SuffixBatch::SuffixBatch(int64_t batch, int max_depth, std::shared_ptr<SuffixCache> cache)
    : max_depth_(max_depth), cache_(std::move(cache)) {
  if (batch < 0) throw std::invalid_argument("SuffixBatch: expected batch of at least 0");
  check_suffix_depth(max_depth);
  rows_.resize(batch);
}

SuffixBatch::~SuffixBatch() { end(); }

int64_t SuffixBatch::bytes() const {
  const Lock lock(mutex_);
  int64_t sum = 0;
  for (const Row& row : rows_) sum += row.tree ? row.tree->bytes() : 0;
  return sum;
}

void SuffixBatch::follow(const int32_t* tokens, int64_t stride, const int32_t* lens,
                         int64_t max_len) {
  const Lock lock(mutex_);
  for (int64_t b = 0; b < batch(); ++b)
    follow_row(rows_[b], tokens + b * stride, std::clamp<int64_t>(lens[b], 0, max_len));
}

void SuffixBatch::follow_row(Row& row, const int32_t* tokens, int64_t length) {
  const int64_t compared = static_cast<int64_t>(row.tail.size());
  const bool same = row.length > 0 && length >= row.length &&
                    std::equal(row.tail.begin(), row.tail.end(), tokens + row.length - compared);
  if (!same) {
    end_row(row);
    row.tree = std::make_unique<SuffixTree>(max_depth_, true);
    row.tree->open();
    row.tree->extend(row.tree->oldest(), tokens, std::max<int64_t>(length - 1, 0));
    row.length = std::max<int64_t>(length - 1, 0);
    if (cache_ && length > 0) row.ticket = cache_->open();
  }
  if (length == row.length) return;
  row.tree->extend(row.tree->oldest(), tokens + row.length, length - row.length);
  if (cache_) cache_->extend(row.ticket, tokens + row.length, length - row.length);
  row.length = length;
  const int64_t kept = std::min(length, std::max<int64_t>(kCompared, max_depth_));
  row.tail.assign(tokens + length - kept, tokens + length);
}

std::vector<SuffixDraft> SuffixBatch::draft(const SuffixDraftOptions& options) const {
  const Lock lock(mutex_);
  std::vector<SuffixDraft> drafts;
  drafts.reserve(rows_.size());
  for (const Row& row : rows_) {
    SuffixDraft best;
    const int64_t length = static_cast<int64_t>(row.tail.size());
    if (row.tree) best = row.tree->draft(row.tail.data(), length, options);
    if (cache_) {
      SuffixDraft other = cache_->draft(row.tail.data(), length, options);
      if (other.score > best.score) best = std::move(other);
    }
    drafts.push_back(std::move(best));
  }
  return drafts;
}

void SuffixBatch::end_row(Row& row) {
  if (cache_) cache_->close(row.ticket);
  row = Row();
}

void SuffixBatch::end() {
  const Lock lock(mutex_);
  for (Row& row : rows_) end_row(row);
}

}  // namespace specdec
