// The online softmax of FlashAttention (arXiv:2205.14135) on fragments of scores.
//
// Scores are in units of log 2, so that the exponential is one instruction. A tile whose keys are
// all hidden changes no bit of the state: the maximum stays, the factor is 1, the weights are 0.
#pragma once

#include "tree_attention/products.cuh"

namespace specdec {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// 2^x with a relative error of 2^-22; exactly 1 at 0 and 0 at -infinity.
__device__ __forceinline__ float exp2_approx(float x) {
#if defined(SPECDEC_CUDA_EMULATED)
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// From a product of query and key to a score.
struct ScoreScale {
  float factor;
  float cap;  // 0: none, else factor leads to the argument of tanh

  __device__ explicit ScoreScale(const TreeAttentionParams& p)
      : factor(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E),
        cap(p.softcap > 0 ? p.softcap * kLog2E : 0.0f) {}
  // Whether the factor may wait for the exponential: maxima must be maxima before it too.
  __device__ bool waits() const { return cap == 0.0f && factor > 0.0f; }
};

__device__ __forceinline__ float capped(float, float x) { return tanhf(x); }
// Its absolute error of 2e-7 vanishes in the rounding of 16-bit queries and keys.
template <class Element>
__device__ __forceinline__ float capped(Element, float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2.0f * kLog2E)));
}

template <class Element, int kKeyTiles>
__device__ __forceinline__ void scale_scores(Fragment (&scores)[kKeyTiles],
                                             const ScoreScale& scale) {
#pragma unroll
  for (Fragment& fragment : scores)
#pragma unroll
    for (float& score : fragment.values) {
      score *= scale.factor;
      if (scale.cap != 0.0f) score = capped(Element(), score) * scale.cap;
    }
}

// Hides keys of row lane / 4 (half 0) or lane / 4 + 8 (half 1); bit i of `seen` is key i of the
// fragments.
template <int kKeyTiles>
__device__ __forceinline__ void hide_keys(Fragment (&scores)[kKeyTiles], int half, uint64_t seen) {
  seen >>= threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (!(seen >> (n * kFragmentKeys + i) & 1)) scores[n].values[2 * half + i] = -kInfinity;
}

__device__ __forceinline__ float finite_base(float max) { return max == -kInfinity ? 0.0f : max; }

// What a lane knows of the two rows of its fragments.
struct SoftmaxState {
  float max[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.0f, 0.0f};  // of the lane's own columns until join_lanes()

  // Turns scores into weights, and gives what the old output is to be multiplied with.
  template <int kKeyTiles>
  __device__ __forceinline__ void add(Fragment (&scores)[kKeyTiles], float factor,
                                      float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -kInfinity;
#pragma unroll
      for (const Fragment& fragment : scores)
        top = fmaxf(top, fmaxf(fragment.values[2 * half], fragment.values[2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float new_max = fmaxf(max[half], top * factor);
      const float base = finite_base(new_max);
      rescale[half] = exp2_approx(max[half] - base);
      max[half] = new_max;
      float total = 0.0f;
#pragma unroll
      for (Fragment& fragment : scores)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = fragment.values[2 * half + i];
          score = exp2_approx(fmaf(score, factor, -base));
          total += score;
        }
      sum[half] = fmaf(sum[half], rescale[half], total);
    }
  }

  __device__ void join_lanes() {
#pragma unroll
    for (float& value : sum) {
      value += __shfl_xor_sync(kAllLanes, value, 1);
      value += __shfl_xor_sync(kAllLanes, value, 2);
    }
  }
};

// Old output to the new maximum. Maxima seldom change after the first tiles; multiplying by 1 would
// change nothing.
template <int kTiles>
__device__ __forceinline__ void rescale_out(Fragment (&out)[kTiles], const float (&rescale)[2]) {
  if (!__any_sync(kAllLanes, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
  for (Fragment& fragment : out)
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment.values[i] *= rescale[i / 2];
}

// The scores of a warp's 16 rows, from first_row of the block on, and of keys from first_key on
// become weights. Tiles of the prefix need no mask.
template <class Element, int kKeyTiles, int kOutTiles>
__device__ __forceinline__ void weigh(const TreeAttentionParams& p, const AttentionUnit& u,
                                      const ScoreScale& scale, int first_key, int first_row,
                                      Fragment (&scores)[kKeyTiles], SoftmaxState& state,
                                      Fragment (&out)[kOutTiles]) {
  if (!scale.waits()) scale_scores<Element>(scores, scale);
  if (!is_open(u, first_key, kKeyTiles * kFragmentKeys)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + threadIdx.x % 32 / 4 + 8 * half;
      const bool live = row < u.live_rows;
      hide_keys(scores, half, live ? visible_keys(p, u, u.slot_of(row), first_key) : 0);
      asm volatile("" ::: "memory");  // one row after the other: both at once would cost registers
    }
  }
  float rescale[2];
  state.add(scores, scale.waits() ? scale.factor : 1.0f, rescale);
  rescale_out(out, rescale);
}

// The same for row tiles that lie row_step rows apart. Not a loop: the compiler doesn't unroll it,
// and fragments with a running index would live in memory instead of registers.
template <class Element, int kTile = 0, int kRowTiles, int kKeyTiles, int kOutTiles>
__device__ __forceinline__ void weigh_tiles(const TreeAttentionParams& p, const AttentionUnit& u,
                                            const ScoreScale& scale, int first_key, int first_row,
                                            int row_step, Fragment (&scores)[kRowTiles][kKeyTiles],
                                            SoftmaxState (&states)[kRowTiles],
                                            Fragment (&out)[kRowTiles][kOutTiles]) {
  if constexpr (kTile < kRowTiles) {
    weigh<Element>(p, u, scale, first_key, first_row + kTile * row_step, scores[kTile],
                   states[kTile], out[kTile]);
    weigh_tiles<Element, kTile + 1>(p, u, scale, first_key, first_row, row_step, scores, states,
                                    out);
  }
}

}  // namespace specdec
