// Flash-style attention over blocks of keys, parallel over (batch, KV head, query chunk, split).
//
// The T * G query rows of a KV head share each K and V row they load. Blocks lie on a grid within
// splits, splits on a grid of split_size, and masked keys are exact no-ops; with a fixed
// split_size a row's result therefore depends on that row alone, not on T, batch or threads.
#include "tree_attention/tree_attention.h"

#include <cmath>

#include "common/element.h"
#include "common/scratch.h"
#include "tree_attention/split.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// ---- combining splits and writing results

SPECDEC_INLINE float merge_weight(float max, float base) {
  return exp2_nonpositive(max - (base == -kInfinity ? 0.0f : base));
}

void merge(const Plan& plan, int64_t rows, const Part& total, const Part& part) {
  for (int64_t row = 0; row < rows; ++row) {
    const float max = part.max[row] > total.max[row] ? part.max[row] : total.max[row];
    const F32 old = broadcast(merge_weight(total.max[row], max));
    const F32 fresh = broadcast(merge_weight(part.max[row], max));
    float* out = total.out + row * plan.v_dim;
    const float* added = part.out + row * plan.v_dim;
    for (int64_t c = 0; c < plan.v_dim; c += kLanes)
      store(out + c, fma(load(added + c), fresh, load(out + c) * old));
    total.denom[row] = total.denom[row] * old[0] + part.denom[row] * fresh[0];
    total.max[row] = max;
  }
}

template <class E>
void write_row(const TreeAttentionParams& p, int64_t b, int64_t slot, int64_t head,
               const float* source, float factor) {
  E* out = static_cast<E*>(p.out) + ((b * p.window_slots + slot) * p.q_heads + head) * p.v_dim;
  int64_t c = 0;
  for (; c + kLanes <= p.v_dim; c += kLanes) store(out + c, load(source + c) * factor);
  if (c < p.v_dim) store_partial(out + c, load(source + c) * factor, int(p.v_dim - c));
}

template <class E>
void write_results(const TreeAttentionParams& p, const Plan& plan, const Unit& u,
                   const Part& part) {
  for (int64_t i = 0; i < u.slots * plan.group; ++i) {
    const int64_t slot = u.first_slot + i / plan.group;
    const int64_t head = u.kv_head * plan.group + i % plan.group;
    float& lse = p.lse[(u.b * p.q_heads + head) * p.window_slots + slot];
    if (i >= u.live_slots * plan.group) {  // padding
      E* out =
          static_cast<E*>(p.out) + ((u.b * p.window_slots + slot) * p.q_heads + head) * p.v_dim;
      std::memset(out, 0, p.v_dim * sizeof(E));
      lse = -kInfinity;
      continue;
    }
    float max = part.max[i], denom = part.denom[i], factor = 1.0f;
    if (p.sinks.data != nullptr) {
      const float sink = at<float>(p.sinks, head) * kLog2E;
      const float top = sink > max ? sink : max;
      factor = merge_weight(max, top);
      denom = denom * factor + merge_weight(sink, top);
      max = top;
    }
    write_row<E>(p, u.b, slot, head, part.out + i * plan.v_dim, denom == 0 ? 0.0f : factor / denom);
    lse = max == -kInfinity && denom == 0 ? max : max * kLn2 + std::log(denom);
  }
}

// ---- tasks

Part part_at(const Plan& plan, float* memory) {
  return {memory, memory + plan.rows * plan.v_dim, memory + plan.rows * (plan.v_dim + 1)};
}

// Pieces of one allocation, each a whole number of cache lines.
struct Pieces {
  char* memory;
  std::size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + used);
    used += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

void lay_out(const Plan& plan, Pieces* pieces, Scratch* s) {
  const int64_t panel = kPanelVectors * kLanes;
  s->queries = pieces->take<Item>(plan.rows * plan.items);
  s->q_panels = pieces->take<Item>(max64(plan.rows, kTallRows) * plan.items);
  s->out_panels = pieces->take<float>(plan.rows * plan.v_dim);
  s->scores = pieces->take<float>(kBlockKeys * max64(panel, kFewRows));
  s->score_columns = pieces->take<float>(kHasTiles ? kBlockKeys * kTallRows : 0);
  s->rescale = pieces->take<float>(plan.rows);
  s->keys = pieces->take<Item>(kBlockKeys * plan.items);
  s->key_copies = pieces->take<Item>(kBlockKeys * spread(plan.items));
  s->values = pieces->take<Item>(kBlockKeys * spread(plan.v_dim));
  s->visible = pieces->take<uint64_t>(plan.chunk_slots * kBlockWords);
  s->words = pieces->take<int32_t>(2 * kBlockWords * plan.rows);
  s->parts = pieces->take<float>(2 * plan.part_floats);
}

bool make_scratch(const Plan& plan, Scratch* s) {
  Pieces pieces = {nullptr};
  lay_out(plan, &pieces, s);
  pieces = {static_cast<char*>(thread_scratch(0, pieces.used))};
  if (pieces.memory == nullptr) return false;
  lay_out(plan, &pieces, s);
  return true;
}

template <class E, class M>
void prepare_queries(const TreeAttentionParams& p, const Plan& plan, const Unit& u,
                     const Scratch& s) {
  const int64_t rows = u.live_slots * plan.group;
  load_queries<E, M>(p, plan, u, s.queries);
  std::memset(s.queries + rows * plan.items, 0,
              (whole_vectors(rows) - rows) * plan.items * sizeof(Item));
  if (kUsesTiles<M> && rows <= kTallRows) pack_queries(plan, rows, s.queries, s.q_panels);
  if (uses_panels<M>(rows)) make_panels(plan, rows, s.queries, s.q_panels);
}

template <class E, class M>
void run_unit(const TreeAttentionParams& p, const Plan& plan, int64_t index, const Scratch& s) {
  const Unit u = make_unit(p, plan, index);
  const int64_t next = index + plan.num_threads;  // most likely what this thread takes then
  const Unit following = make_unit(p, plan, min64(next, plan.units - 1));
  const Unit* const ask = next < plan.units ? &following : nullptr;
  const Part total = part_at(plan, s.parts);
  if (u.live_slots > 0) {
    prepare_queries<E, M>(p, plan, u, s);
    attend_split<E, M>(p, plan, u, 0, u.splits == 1 ? ask : nullptr, s, total);
    for (int64_t split = 1; split < u.splits; ++split) {
      const Part part = part_at(plan, s.parts + plan.part_floats);
      attend_split<E, M>(p, plan, u, split, split == u.splits - 1 ? ask : nullptr, s, part);
      merge(plan, u.live_slots * plan.group, total, part);
    }
  }
  write_results<E>(p, plan, u, total);
}

// The last thread to finish a split of the unit merges them all, in order.
template <class E, class M>
void run_split(const TreeAttentionParams& p, const Plan& plan, int64_t index, int64_t split,
               const Scratch& s) {
  const Unit u = make_unit(p, plan, index);
  if (split >= u.splits) return;
  float* parts = plan.parts + index * plan.splits * plan.part_floats;
  if (u.live_slots > 0) {
    prepare_queries<E, M>(p, plan, u, s);
    attend_split<E, M>(p, plan, u, split, nullptr, s,
                       part_at(plan, parts + split * plan.part_floats));
  }
  const int32_t done = __atomic_add_fetch(&plan.remaining[index], 1, __ATOMIC_ACQ_REL);
  if (done < u.splits) return;
  const Part total = part_at(plan, parts);
  for (int64_t i = 1; i < u.splits; ++i)
    merge(plan, u.live_slots * plan.group, total, part_at(plan, parts + i * plan.part_floats));
  write_results<E>(p, plan, u, total);
}

template <bool tiles>
struct MayUseTiles {};
template <>
struct MayUseTiles<true> : TileScope {};

template <class E>
Status run(const TreeAttentionParams& p) {
  typedef typename ItemsOf<E>::type M;
  Plan plan = make_plan(p, M::kElements);
  const int64_t units = plan.units;
  int64_t tasks = units;
  if (plan.parallel_splits) {
    tasks = units * plan.splits;
    const int64_t floats = tasks * plan.part_floats;
    plan.parts = static_cast<float*>(thread_scratch(1, (floats + units) * sizeof(float)));
    if (plan.parts == nullptr) return Status::out_of_memory;
    plan.remaining = reinterpret_cast<int32_t*>(plan.parts + floats);
    std::memset(plan.remaining, 0, units * sizeof(int32_t));
  }
  bool failed = false;
#pragma omp parallel num_threads(plan.num_threads) if (plan.num_threads > 1)
  {
    Scratch s;
    const bool ready = make_scratch(plan, &s);
    if (!ready) failed = true;
    const MayUseTiles<kUsesTiles<M>> tiles;
    (void)tiles;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      if (!ready) continue;
      if (plan.parallel_splits)
        run_split<E, M>(p, plan, task / plan.splits, task % plan.splits, s);
      else
        run_unit<E, M>(p, plan, task, s);
    }
  }
  return failed ? Status::out_of_memory : Status::ok;
}

}  // namespace

Status tree_attention(const TreeAttentionParams& p) {
  if (p.batch == 0 || p.window_slots == 0 || p.q_heads == 0) return Status::ok;
  return with_element(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
