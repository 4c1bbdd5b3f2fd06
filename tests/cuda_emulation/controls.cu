// Small kernels, right and wrong: tests/test_cuda_emulation.py runs them to see that the emulation
// gives right results and catches every fault. Prints "right", "wrong" or the fault.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/async_copy.cuh"
#include "common/element.cuh"
#include "common/launch.cuh"
#include "common/matrix.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kSize = 1000;

enum class Fault {
  none,
  global_out_of_bounds,
  shared_out_of_bounds,
  dynamic_shared_out_of_bounds,
  missing_barrier,
  divergent_barrier,
  divergent_shuffle,
  shuffle_from_outside,
  unwritten_shared,
  missing_wait,
  misaligned_load
};
constexpr const char* kNames[] = {"none",
                                  "global_out_of_bounds",
                                  "shared_out_of_bounds",
                                  "dynamic_shared_out_of_bounds",
                                  "missing_barrier",
                                  "divergent_barrier",
                                  "divergent_shuffle",
                                  "shuffle_from_outside",
                                  "unwritten_shared",
                                  "missing_wait",
                                  "misaligned_load"};

// The sum of a block's slice of kSize numbers.
template <Fault kFault>
__global__ void sum_kernel(const float* values, float* sums) {
  SPECDEC_SHARED(float[kWarps], parts);
  const float* slice = values + blockIdx.x * kSize;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < kSize + (kFault == Fault::global_out_of_bounds); i += kThreads)
    sum += slice[i];
  if (kFault == Fault::divergent_shuffle && threadIdx.x == 70)
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
  if (kFault == Fault::shuffle_from_outside && lane < 16) sum += __shfl_xor_sync(0xffffu, sum, 16);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const bool writes = kFault != Fault::unwritten_shared || warp != 2;
  if (lane == 0 && writes) parts[warp + (kFault == Fault::shared_out_of_bounds)] = sum;
  if (kFault == Fault::divergent_barrier) {
    if (warp == 0) __syncthreads();
  }
  if (kFault != Fault::missing_barrier) __syncthreads();
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0] + parts[1] + parts[2] + parts[3];
}

// Turns 4 * kThreads numbers around through shared memory, four at a time.
template <Fault kFault>
__global__ void reverse_kernel(const float* values, float* reversed) {
  float* held = reinterpret_cast<float*>(dynamic_shared());
  const int at = 4 * threadIdx.x, last = 4 * kThreads - 1;
  cp_async_16(held + at + (kFault == Fault::dynamic_shared_out_of_bounds ? 4 : 0),
              values + at + (kFault == Fault::misaligned_load ? 1 : 0));
  cp_async_commit();
  if (kFault != Fault::missing_wait) cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) reversed[at + i] = held[last - at - i];
}

// C = A B for A [16, 16] and B [16, 8], both row-major, by one warp.
template <class T>
__global__ void product_kernel(const T* a, const T* b, float* c) {
  const int lane = threadIdx.x;
  uint32_t a_registers[4], b_registers[2];
  ldmatrix_x4(a_registers, a + lane % 16 * 16 + lane / 16 * 8);
  ldmatrix_x2_transposed(b_registers, b + lane % 16 * 8);
  float d[4] = {};
  mma_16816<T>(d, a_registers, b_registers);
  for (int r = 0; r < 4; ++r) c[(lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2] = d[r];
}

const char* verdict(bool right) { return right ? "right" : "wrong"; }

template <Fault kFault>
const char* run_sum() {
  constexpr int kBlocks = 3;
  std::vector<float> values(kBlocks * kSize), sums(kBlocks, -1.0f);
  for (int i = 0; i < kBlocks * kSize; ++i) values[i] = float(i % 7);
  launch(sum_kernel<kFault>, kBlocks, kThreads, 0, nullptr, values.data(), sums.data());
  bool right = true;
  for (int block = 0; block < kBlocks; ++block) {
    float expected = 0.0f;
    for (int i = 0; i < kSize; ++i) expected += values[block * kSize + i];
    right = right && sums[block] == expected;
  }
  return verdict(right);
}

template <Fault kFault>
const char* run_reverse() {
  constexpr int kCount = 4 * kThreads;
  auto* values = static_cast<float*>(std::aligned_alloc(16, (kCount + 4) * sizeof(float)));
  std::vector<float> reversed(kCount, -1.0f);
  for (int i = 0; i < kCount + 4; ++i) values[i] = float(i);
  launch(reverse_kernel<kFault>, 1, kThreads, kCount * sizeof(float), nullptr, values,
         reversed.data());
  bool right = true;
  for (int i = 0; i < kCount; ++i) right = right && reversed[i] == values[kCount - 1 - i];
  std::free(values);
  return verdict(right);
}

template <class T>
const char* run_product() {
  alignas(16) T a[16 * 16], b[16 * 8];
  float c[16 * 8];
  for (int i = 0; i < 16 * 16; ++i) a[i] = from_float<T>(float(i * 37 % 23 - 11));
  for (int i = 0; i < 16 * 8; ++i) b[i] = from_float<T>(float(i * 29 % 19 - 9));
  launch(product_kernel<T>, 1, 32, 0, nullptr, a, b, c);
  bool right = true;
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float expected = 0.0f;
      for (int k = 0; k < 16; ++k)
        expected += to_float(a[row * 16 + k]) * to_float(b[k * 8 + column]);
      right = right && c[row * 8 + column] == expected;
    }
  }
  return verdict(right);
}

// Against the compiler's own 16-bit floats.
const char* run_conversions() {
  bool right = true;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = uint16_t(bits);
    _Float16 value;
    std::memcpy(&value, &half, 2);
    if (value == value) right = right && to_float(Half{half}) == float(value);
  }
  for (uint32_t bits = 0; bits < 0xff000000u; bits += 9973) {
    float value;
    std::memcpy(&value, &bits, 4);
    if (value != value) continue;
    const _Float16 expected = _Float16(value);
    const Half rounded = from_float<Half>(value);
    right = right && std::memcmp(&expected, &rounded, 2) == 0;
  }
  return verdict(right);
}

const char* run(const std::string& name) {
  if (name == "sum") return run_sum<Fault::none>();
  if (name == "reverse") return run_reverse<Fault::none>();
  if (name == "product_bf16") return run_product<BFloat16>();
  if (name == "product_f16") return run_product<Half>();
  if (name == "conversions") return run_conversions();
#define SPECDEC_CONTROL(runner, fault) \
  if (name == kNames[int(Fault::fault)]) return runner<Fault::fault>();
  SPECDEC_CONTROL(run_sum, global_out_of_bounds)
  SPECDEC_CONTROL(run_sum, shared_out_of_bounds)
  SPECDEC_CONTROL(run_sum, missing_barrier)
  SPECDEC_CONTROL(run_sum, divergent_barrier)
  SPECDEC_CONTROL(run_sum, divergent_shuffle)
  SPECDEC_CONTROL(run_sum, shuffle_from_outside)
  SPECDEC_CONTROL(run_sum, unwritten_shared)
  SPECDEC_CONTROL(run_reverse, dynamic_shared_out_of_bounds)
  SPECDEC_CONTROL(run_reverse, missing_wait)
  SPECDEC_CONTROL(run_reverse, misaligned_load)
#undef SPECDEC_CONTROL
  return "no such control";
}

}  // namespace
}  // namespace specdec

int main(int count, char** arguments) {
  if (count != 3) return 2;
  cuda_emulation::set_schedule(unsigned(std::atoi(arguments[2])));
  try {
    std::puts(specdec::run(arguments[1]));
  } catch (const cuda_emulation::Fault& fault) {
    std::puts(fault.what());
  }
}
