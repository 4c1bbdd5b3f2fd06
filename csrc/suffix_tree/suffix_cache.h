#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "suffix_tree/suffix_tree.h"

namespace specdec {

// What requests have generated, for drafts of later ones. The oldest requests leave when there are
// more than max_requests of them or max_tokens tokens; a text that is longer alone is cut. Calls
// from several threads take turns.
class SuffixCache {
 public:
  // A text under way. It becomes stale when the text leaves the cache or the cache is replaced: the
  // text's further tokens are ignored.
  struct Ticket {
    uint32_t text = 0;
    uint64_t generation = 0;
  };

  SuffixCache(int max_depth, int64_t max_requests, int64_t max_tokens);

  Ticket open();
  void extend(const Ticket& ticket, const int32_t* tokens, int64_t count);
  void close(const Ticket& ticket);
  SuffixDraft draft(const int32_t* context, int64_t length,
                    const SuffixDraftOptions& options) const;

  int64_t num_requests() const;
  int64_t num_tokens() const;
  int64_t bytes() const;
  int max_depth() const { return max_depth_; }
  void clear();
  // All texts, oldest first, in one piece, and their lengths; load() puts such in place of what
  // there is.
  void texts(std::vector<int32_t>& tokens, std::vector<int64_t>& lengths) const;
  void load(const int32_t* tokens, int64_t count, const int64_t* lengths, int64_t num_texts);

 private:
  static uint32_t open_in(SuffixTree& tree, int64_t max_requests);
  void extend_in(SuffixTree& tree, uint32_t text, const int32_t* tokens, int64_t count) const;
  bool holds(const Ticket& ticket) const {
    return ticket.generation == generation_ && tree_->holds(ticket.text);
  }

  const int max_depth_;
  const int64_t max_requests_;
  const int64_t max_tokens_;
  mutable std::mutex mutex_;
  uint64_t generation_ = 1;  // of the tree; no ticket has 0
  std::unique_ptr<SuffixTree> tree_;
};

// The texts of a batch: each row's own tree, and its part behind the prompt in a cache. Calls from
// several threads take turns.
class SuffixBatch {
 public:
  // cache: null for none.
  SuffixBatch(int64_t batch, int max_depth, std::shared_ptr<SuffixCache> cache);
  ~SuffixBatch();
  SuffixBatch(const SuffixBatch&) = delete;
  SuffixBatch& operator=(const SuffixBatch&) = delete;

  int64_t batch() const { return static_cast<int64_t>(rows_.size()); }
  int64_t bytes() const;
  // Takes what is new in tokens [B, stride]. A row that is empty, got shorter, or has other last
  // tokens than before starts afresh: all but its last token is a prompt.
  void follow(const int32_t* tokens, int64_t stride, const int32_t* lens, int64_t max_len);
  // One draft per row: the better one of its own tree's and the cache's, its own if equal.
  std::vector<SuffixDraft> draft(const SuffixDraftOptions& options) const;
  // Nothing more will follow: the cache holds the texts whole.
  void end();

 private:
  struct Row {
    std::vector<int32_t> tail;  // last tokens
    int64_t length = 0;
    SuffixCache::Ticket ticket;
    std::unique_ptr<SuffixTree> tree;
  };

  void follow_row(Row& row, const int32_t* tokens, int64_t length);
  void end_row(Row& row);

  const int max_depth_;
  const std::shared_ptr<SuffixCache> cache_;
  std::vector<Row> rows_;
  mutable std::mutex mutex_;
};

}  // namespace specdec
