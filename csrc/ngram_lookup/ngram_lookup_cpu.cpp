#include "ngram_lookup/ngram_lookup.h"

#include <cstring>

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

struct Match {
  int64_t end;
  int64_t length;
};

// The best matches of one row so far, best first. Positions arrive in order of preference among
// equal lengths, so a newcomer ranks behind all that are at least as long.
struct Best {
  const int32_t* text;
  int64_t len;
  int64_t k;
  int64_t max_n;
  int capacity;
  int size = 0;
  Match matches[kMaxNgramMatches];

  bool can_take(int64_t length) const {
    return size < capacity || length > matches[size - 1].length;
  }
  bool complete() const { return size == capacity && matches[size - 1].length == max_n; }

  int32_t drafted(int64_t end, int64_t j) const { return text[end + 1 + j % (len - 1 - end)]; }

  bool same_draft(int64_t a, int64_t b) const {
    const int64_t far = a < b ? a : b, near = a < b ? b : a;
    const int32_t* draft = text + far + 1;
    if (len - 1 - far < k) {  // both wrap around
      for (int64_t j = 0; j < k; ++j)
        if (drafted(far, j) != drafted(near, j)) return false;
      return true;
    }
    // The nearer one repeats its first tokens: the other must start with them and repeat itself.
    const int64_t period = len - 1 - near < k ? len - 1 - near : k;
    return std::memcmp(draft, text + near + 1, period * sizeof(int32_t)) == 0 &&
           std::memcmp(draft, draft + period, (k - period) * sizeof(int32_t)) == 0;
  }

  void take(Match match) {
    int place = size;
    while (place > 0 && matches[place - 1].length < match.length) --place;
    for (int i = 0; i < place; ++i)
      if (same_draft(matches[i].end, match.end)) return;
    int freed = place;  // a worse match with this draft makes room, else the worst one may
    while (freed < size && !same_draft(matches[freed].end, match.end)) ++freed;
    if (freed == size && size < capacity) ++size;
    if (freed == capacity) --freed;
    for (int i = freed; i > place; --i) matches[i] = matches[i - 1];
    matches[place] = match;
  }
};

SPECDEC_INLINE void consider(Best& best, int64_t end, int64_t min_n) {
  const int32_t* text = best.text;
  const int64_t last = best.len - 1;
  if (text[end] != text[last]) return;
  const int64_t limit = end + 1 < best.max_n ? end + 1 : best.max_n;
  int64_t length = 1;
  while (length < limit && text[end - length] == text[last - length]) ++length;
  if (length >= min_n && best.can_take(length)) best.take({end, length});
}

constexpr int kBlockVectors = 4;
constexpr int64_t kBlock = kBlockVectors * kLanes;
constexpr int64_t kLineTokens = 16;  // of a line of the cache
constexpr int kBlockLines = int((kBlock + kLineTokens - 1) / kLineTokens);
constexpr int64_t kAhead = 1024;       // tokens: more than memory's latency
constexpr int64_t kSegment = 1 << 15;  // tokens; fits into every second-level cache

void consider_range(Best& best, int64_t begin, int64_t end, int64_t min_n, bool latest) {
  for (int64_t i = begin; i < end && !best.complete(); ++i)
    consider(best, latest ? begin + end - 1 - i : i, min_n);
}

// The candidates of a whole block, vector by vector.
SPECDEC_INLINE void consider_block(Best& best, int64_t begin, int64_t min_n, I32 token,
                                   bool latest) {
  for (int v = 0; v < kBlockVectors; ++v) {
    const int64_t first = begin + (latest ? kBlockVectors - 1 - v : v) * kLanes;
    if (any_equal<1>(best.text + first, token))
      consider_range(best, first, first + kLanes, min_n, latest);
  }
}

// The blocks of one segment that hold `token`, in the order of the text. All are looked at first,
// upwards and far ahead, which is how memory is read fastest.
struct Blocks {
  int64_t begins[kSegment / kBlock];
  int64_t size = 0;

  void find(const int32_t* text, int64_t begin, int64_t end, I32 token) {
    size = 0;
    for (; begin < end; begin += kBlock) {
      for (int line = 0; line < kBlockLines; ++line)
        __builtin_prefetch(text + begin + kAhead + line * kLineTokens, 0, 3);
      begins[size] = begin;
      size += any_equal<kBlockVectors>(text + begin, token);
    }
  }
};

void find(Best& best, int64_t min_n, bool latest) {
  const int64_t count = best.len - 1;  // candidate positions
  if (count < 1) return;
  const I32 token = broadcast_i32(best.text[count]);
  const int64_t whole = count - count % kBlock;
  if (latest) consider_range(best, whole, count, min_n, true);
  Blocks blocks;
  for (int64_t done = 0; done < whole && !best.complete(); done += kSegment) {
    const int64_t size = kSegment < whole - done ? kSegment : whole - done;
    const int64_t begin = latest ? whole - done - size : done;
    blocks.find(best.text, begin, begin + size, token);
    for (int64_t i = 0; i < blocks.size && !best.complete(); ++i)
      consider_block(best, blocks.begins[latest ? blocks.size - 1 - i : i], min_n, token, latest);
  }
  if (!latest) consider_range(best, whole, count, min_n, false);
}

void lookup_row(const NgramLookupParams& p, int64_t b) {
  Best best;
  best.text = p.tokens + b * p.tokens_stride;
  best.len = p.lens[b] < p.max_len ? p.lens[b] : p.max_len;
  best.k = p.k;
  best.max_n = p.max_n;
  best.capacity = p.num_matches;
  find(best, p.min_n, p.latest);
  int64_t* ids = p.draft_token_ids + b * p.num_matches * p.k;
  for (int i = 0; i < p.num_matches; ++i) {
    const bool real = i < best.size;
    p.num[b * p.num_matches + i] = real ? int32_t(p.k) : 0;
    for (int64_t j = 0; j < p.k; ++j) *ids++ = real ? best.drafted(best.matches[i].end, j) : -1;
  }
}

}  // namespace

Status ngram_lookup(const NgramLookupParams& p) {
  if (p.num_matches > kMaxNgramMatches) return Status::unsupported_shape;
#pragma omp parallel for num_threads(p.num_threads) \
    schedule(dynamic) if (p.batch * p.max_len > (1 << 15))
  for (int64_t b = 0; b < p.batch; ++b) lookup_row(p, b);
  return Status::ok;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
