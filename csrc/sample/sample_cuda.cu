// One launch: blocks scan slices of the rows, the last block of each row draws its token.
#include "sample/sample.h"

#include "common/device_guard.cuh"
#include "common/sampling_workspace.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

struct Workspace {
  Key* tickets;      // [rows]
  Scanned* scanned;  // [rows, slices]
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ LogitRows rows,
                  const Workspace space, const Slices slices) {
  const int64_t r = blockIdx.x / static_cast<uint32_t>(slices.count);
  const int64_t slice = blockIdx.x % static_cast<uint32_t>(slices.count);
  const Source<T> row(rows, r, 0);
  const float temperature = p.sampling.temperature[r];
  const Noise noise(p.sampling.seed[r], p.sampling.position[r], p.stream);
  const int64_t begin = slice * slices.length;
  Scanned scanned = scan_slice(row, begin, min(begin + slices.length, p.vocab), temperature,
                               temperature > 0.0f, noise);
  if (slices.count > 1) {
    Scanned* of_row = space.scanned + r * slices.count;
    store_scanned(of_row + slice, scanned);
    if (!is_last_block(space.tickets + r, slices.count)) return;
    scanned = merge_slices(of_row, slices.count);
  }
  const Distribution from = distribution_of(row, scanned, p.sampling, r);
  const int64_t token = draw(row, scanned, from, noise);
  if (threadIdx.x == 0) p.tokens[r] = token;
}

WindowArrays roots_of(const SampleParams& p) { return {nullptr, nullptr, nullptr, p.rows, 1}; }

Workspace divide(Arena& arena, const SampleParams& p, const Slices& slices, EditTables& tables) {
  Workspace space;
  space.tickets = arena.take<Key>(p.rows);
  space.scanned = arena.take<Scanned>(p.rows * slices.count);
  tables = take_edit_tables(arena, p.sampling.edits, roots_of(p), p.vocab);
  return space;
}

}  // namespace
}  // namespace SPECDEC_ISA

using namespace SPECDEC_ISA;

int64_t sample_cuda_workspace(const SampleParams& p) {
  if (p.rows == 0) return 0;
  Arena arena(nullptr);
  EditTables tables;
  divide(arena, p, Slices(p.rows, p.vocab), tables);
  return arena.words();
}

int sample_cuda(const SampleParams& p, void* workspace, const CudaLaunch& where) {
  if (p.rows == 0) return cudaSuccess;
  const DeviceGuard guard(where.device);
  if (guard.error() != cudaSuccess) return guard.error();
  const Slices slices(p.rows, p.vocab);
  if (p.rows * slices.count > INT32_MAX) return cudaErrorInvalidValue;
  Arena arena(workspace);
  LogitRows rows = {p.logits, p.stride, 0, p.vocab, p.sampling.edits, {}, roots_of(p)};
  const Workspace space = divide(arena, p, slices, rows.tables);
  const cudaStream_t stream = static_cast<cudaStream_t>(where.stream);
  const cudaError_t error = list_edits(rows, stream);
  if (error != cudaSuccess) return error;
  return with_element(p.dtype, [&](auto element) {
    return launch(sample_kernel<decltype(element)>, static_cast<unsigned>(p.rows * slices.count),
                  kThreads, 0, stream, p, rows, space, slices);
  });
}

}  // namespace specdec
