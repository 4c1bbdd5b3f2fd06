#pragma once

#include "common/cuda_launch.h"
#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

constexpr int kMaxNgramMatches = 64;

// Finds earlier occurrences of a text's last tokens and copies what followed them.
//
// Text of row b: its first lens[b] tokens. Position e < len - 1 matches with length L when the L
// tokens that end at e equal the last L tokens; L counts up to max_n. Better is longer, then later
// (or earlier, when latest is false). A match drafts text[e + 1 + j % (len - 1 - e)] for j < k, so
// one that runs off the end continues periodically. Among matches with the same draft only the best
// counts.
struct NgramLookupParams {
  const int32_t* tokens;  // [B, tokens_stride]
  int64_t tokens_stride;
  const int32_t* lens;  // [B]
  int64_t batch;
  int64_t max_len;  // tokens a row has room for; a longer lens counts as this
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int num_matches;  // at most kMaxNgramMatches
  bool latest;

  int64_t* draft_token_ids;  // [B, num_matches, k], -1 where there is no match
  int32_t* num;              // [B, num_matches]: k or 0
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(ngram_lookup, NgramLookupParams)

namespace specdec {

// Zeroed 64-bit words of workspace that ngram_lookup_cuda needs.
int64_t ngram_lookup_workspace(int64_t batch, int64_t max_len, int num_matches);

// Every pointer is device memory. One launch, which reads 4 * lens[b] bytes of every row once,
// looks back at most max_n tokens from those that equal the last one (they are in the cache), and
// writes 8 * k + 4 bytes per match.
int ngram_lookup_cuda(const NgramLookupParams& params, void* workspace, const CudaLaunch& launch);

}  // namespace specdec
