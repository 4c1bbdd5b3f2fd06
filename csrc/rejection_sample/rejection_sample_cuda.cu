// `coupled` is one launch: blocks scan slices of all rows of logits, the last block of a slot draws
// its token, and the last block of a batch row walks the window. The other rules take three: the
// scan leaves distributions, one block for each batch row walks, and then the token behind the
// accepted ones is drawn from the one row that it depends on, by many blocks.
#include "rejection_sample/rejection_sample.h"

#include "common/device_guard.cuh"
#include "rejection_sample/draw.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class T, bool kCoupled>
__global__ void __launch_bounds__(kThreads, 1) scan_kernel(const __grid_constant__ Arguments a) {
  const Piece piece(a, blockIdx.x);
  const int64_t b = piece.b, slot = piece.slot, nodes = num_nodes(a.params.window, b);
  const bool is_first = slot == 0 && piece.slice == 0 && !piece.of_draft;
  if (nodes == 0 && is_first) AcceptanceWriter(a.params, b).finish();
  if (slot >= nodes) return;
  scan<T, kCoupled>(a, piece);
  const int64_t pieces = a.target_slices.count * (a.has_draft() ? 2 : 1);
  if (!is_last_block(a.space.node_tickets + b * a.params.window.width + slot, pieces)) return;
  finish_node<T, kCoupled>(a, b, slot);
  if constexpr (kCoupled) {
    if (is_last_block(a.space.row_tickets + b, nodes)) walk_coupled(a, b);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) walk_kernel(const __grid_constant__ Arguments a) {
  if (num_nodes(a.params.window, blockIdx.x) > 0) Walk<T>(a, blockIdx.x).run();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    draw_kernel(const __grid_constant__ Arguments a, const Slices slices) {
  const uint32_t count = static_cast<uint32_t>(slices.count);
  draw_slice<T>(a, slices, blockIdx.x / count, blockIdx.x % count);
}

__global__ void __launch_bounds__(kThreads)
    invert_map_kernel(const int64_t* map, const int64_t size, int32_t* inverse,
                      const int64_t vocab) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size && map[i] >= 0 && map[i] < vocab) inverse[map[i]] = static_cast<int32_t>(i + 1);
}

Workspace divide(Arena& arena, const RejectionSampleParams& p, const Slices& slices,
                 EditTables& tables) {
  const int64_t batch = p.window.batch, nodes = batch * p.window.width;
  Workspace space{};
  space.node_tickets = arena.take<Key>(nodes);
  space.row_tickets = arena.take<Key>(batch);
  space.draw_tickets = arena.take<Key>(batch);
  space.drawn = arena.take<Key>(batch);
  space.jobs = arena.take<Job>(batch);
  space.nodes = arena.take<Node>(nodes);
  space.rounds = arena.take<Round>(nodes);
  space.stands = arena.take<int32_t>(nodes);
  space.scanned = arena.take<Scanned>(nodes * (p.draft == nullptr ? 1 : 2) * slices.count);
  if (p.draft_vocab_map != nullptr) space.inverse_map = arena.take<int32_t>(p.vocab);
  tables = take_edit_tables(arena, p.sampling.edits, p.window, p.vocab);
  return space;
}

Arguments arguments_of(const RejectionSampleParams& p, Arena& arena) {
  const int64_t nodes = p.window.batch * p.window.width;
  const int64_t rows = nodes * (p.draft == nullptr ? 1 : 2);
  const Slices slices(rows, p.vocab);
  const LogitRows target = {
      p.target, p.target_stride_b, p.target_stride_t, p.vocab, p.sampling.edits, {}, p.window};
  const LogitRows draft = {p.draft, p.draft_stride_b, p.draft_stride_t, p.draft_vocab, {},
                           {},      p.window};
  Arguments a = {p, target, draft, {}, slices, slices.cut(p.draft_vocab)};
  a.space = divide(arena, p, slices, a.target.tables);
  return a;
}

cudaError_t prepare(const Arguments& a, cudaStream_t stream) {
  const RejectionSampleParams& p = a.params;
  if (p.draft_vocab_map != nullptr) {
    const unsigned blocks = static_cast<unsigned>((p.draft_vocab + kThreads - 1) / kThreads);
    const cudaError_t error =
        launch(invert_map_kernel, blocks, kThreads, 0, stream, p.draft_vocab_map, p.draft_vocab,
               a.space.inverse_map, p.vocab);
    if (error != cudaSuccess) return error;
  }
  return list_edits(a.target, stream);
}

template <class T>
cudaError_t run(const Arguments& a, cudaStream_t stream) {
  const int64_t batch = a.params.window.batch;
  const int64_t rows = batch * a.params.window.width * (a.has_draft() ? 2 : 1);
  if (rows * a.target_slices.count > INT32_MAX) return cudaErrorInvalidValue;
  const unsigned pieces = static_cast<unsigned>(rows * a.target_slices.count);
  if (a.params.rule == Rule::coupled)
    return launch(scan_kernel<T, true>, pieces, kThreads, 0, stream, a);
  cudaError_t error = launch(scan_kernel<T, false>, pieces, kThreads, 0, stream, a);
  if (error != cudaSuccess) return error;
  error = launch(walk_kernel<T>, static_cast<unsigned>(batch), kThreads, 0, stream, a);
  if (error != cudaSuccess) return error;
  const Slices draws(batch, a.params.vocab);
  return launch(draw_kernel<T>, static_cast<unsigned>(batch * draws.count), kThreads, 0, stream, a,
                draws);
}

}  // namespace
}  // namespace SPECDEC_ISA

using namespace SPECDEC_ISA;

int64_t rejection_sample_cuda_workspace(const RejectionSampleParams& p) {
  if (p.window.batch == 0) return 0;
  Arena arena(nullptr);
  arguments_of(p, arena);
  return arena.words();
}

int rejection_sample_cuda(const RejectionSampleParams& p, void* workspace,
                          const CudaLaunch& where) {
  if (p.window.batch == 0) return cudaSuccess;
  const DeviceGuard guard(where.device);
  if (guard.error() != cudaSuccess) return guard.error();
  Arena arena(workspace);
  const Arguments a = arguments_of(p, arena);
  const cudaStream_t stream = static_cast<cudaStream_t>(where.stream);
  const cudaError_t error = prepare(a, stream);
  if (error != cudaSuccess) return error;
  return with_element(p.target_dtype,
                      [&](auto element) { return run<decltype(element)>(a, stream); });
}

}  // namespace specdec
