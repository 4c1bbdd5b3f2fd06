#include "commit_kv/commit_kv.h"

#include <cstring>

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kBytesPerThread = 1 << 20;  // copied in about the time of waking a thread

struct Cache {
  char* base;
  const int64_t* shape;
  const int64_t* stride;
};

char* row_pointer(const CommitKvParams& p, const Cache& cache, int64_t b, int64_t head,
                  int64_t slot) {
  int64_t offset;
  if (p.block_table == nullptr) {
    offset = b * cache.stride[0] + head * cache.stride[1] + slot * cache.stride[2];
  } else {
    const int64_t page_size = cache.shape[1];
    const int64_t page = p.block_table[b * p.block_table_stride + slot / page_size];
    offset = page * cache.stride[0] + slot % page_size * cache.stride[1] + head * cache.stride[2];
  }
  return cache.base + offset * p.item_size;
}

void commit_row(const CommitKvParams& p, const Cache& cache, int64_t b) {
  const int64_t heads = cache.shape[p.block_table == nullptr ? 1 : 2];
  const int64_t bytes = cache.shape[3] * p.item_size;
  const int32_t* path = p.path + b * p.path_stride;
  const int64_t prefix = p.prefix_len[b];
  for (int64_t i = 0; i < p.num_kept[b]; ++i) {
    if (path[i] <= i) continue;  // already in place (or padding)
    for (int64_t head = 0; head < heads; ++head)
      std::memcpy(row_pointer(p, cache, b, head, prefix + i),
                  row_pointer(p, cache, b, head, prefix + path[i]), bytes);
  }
}

// Rows of the first cache stand for all: the sum decides only whether threads pay.
int64_t bytes_to_move(const CommitKvParams& p) {
  int64_t rows = 0;
  for (int64_t b = 0; b < p.batch; ++b) rows += p.num_kept[b];
  const int64_t heads = p.shapes[p.block_table == nullptr ? 1 : 2];
  return p.num_caches * rows * heads * p.shapes[3] * p.item_size;
}

}  // namespace

Status commit_kv(const CommitKvParams& p) {
  const int64_t work = p.num_caches * p.batch;
  const bool threads_pay = bytes_to_move(p) > kBytesPerThread;
#pragma omp parallel for num_threads(p.num_threads) schedule(static) if (threads_pay)
  for (int64_t index = 0; index < work; ++index) {
    const int64_t c = index / p.batch;
    const Cache cache{static_cast<char*>(p.caches[c]), p.shapes + 4 * c, p.strides + 4 * c};
    commit_row(p, cache, index % p.batch);
  }
  return Status::ok;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
