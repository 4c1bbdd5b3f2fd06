// Warp operations: every lane in the mask brings a value, the last to come works out the results.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulation/scheduler.h"

namespace cuda_emulation {

constexpr uint32_t kAllLanes = 0xffffffffu;

template <class T>
void store(Payload& payload, const T& value, size_t at = 0) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(Payload));
  std::memcpy(reinterpret_cast<char*>(payload.data()) + at, &value, sizeof(T));
}
template <class T>
T load(const Payload& payload, size_t at = 0) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char*>(payload.data()) + at, sizeof(T));
  return value;
}

constexpr size_t kSourceAt = 32, kWidthAt = 36;  // behind the value that a shuffle brings

// Each lane takes the value of the lane that `source(lane, argument, width)` names.
template <int (*source)(int, int, int)>
void take_from_source(const Lanes& lanes) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((lanes.mask >> lane & 1) == 0) continue;
    const Payload& own = *lanes.given[lane];
    const int from = source(int(lane), load<int>(own, kSourceAt), load<int>(own, kWidthAt));
    if ((lanes.mask >> from & 1) == 0) throw Fault("shuffle from a lane outside the mask");
    *lanes.taken[lane] = *lanes.given[from];
  }
}

inline int indexed_lane(int lane, int index, int width) {
  return (lane & ~(width - 1)) + (index & (width - 1));
}
inline int xor_lane(int lane, int bits, int width) {
  const int other = lane ^ bits;
  return other < (lane & ~(width - 1)) + width ? other : lane;
}
inline int lane_below(int lane, int distance, int width) {
  return (lane & (width - 1)) < distance ? lane : lane - distance;
}
inline int lane_above(int lane, int distance, int width) {
  return (lane & (width - 1)) + distance >= width ? lane : lane + distance;
}

template <class T, int (*source)(int, int, int)>
T shuffle(const char* name, uint32_t mask, T value, int argument, int width, Where where) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8, "CUDA shuffles numbers only");
  Payload given;
  store(given, value);
  store(given, argument, kSourceAt);
  store(given, width, kWidthAt);
  return load<T>(meet(mask, name, given, take_from_source<source>, where));
}

inline void vote(const Lanes& lanes) {
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if (lanes.mask >> lane & 1) bits |= uint32_t((*lanes.given[lane])[0] != 0) << lane;
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if (lanes.mask >> lane & 1) (*lanes.taken[lane])[0] = bits;
}
inline uint32_t ballot(const char* name, uint32_t mask, int predicate, Where where) {
  Payload given;
  given[0] = predicate != 0;
  return meet(mask, name, given, vote, where)[0];
}

// Each lane takes combine() of the values of all.
template <class T, T (*combine)(T, T)>
void reduce(const Lanes& lanes) {
  bool first = true;
  T total{};
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((lanes.mask >> lane & 1) == 0) continue;
    const T value = load<T>(*lanes.given[lane]);
    total = first ? value : combine(total, value);
    first = false;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if (lanes.mask >> lane & 1) store(*lanes.taken[lane], total);
}
template <class T, T (*combine)(T, T)>
T reduced(const char* name, uint32_t mask, T value, Where where) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "CUDA reduces 32-bit integers only");
  Payload given;
  store(given, value);
  return load<T>(meet(mask, name, given, reduce<T, combine>, where));
}
template <class T>
T sum_of(T a, T b) {
  return T(uint32_t(a) + uint32_t(b));
}
template <class T>
T larger_of(T a, T b) {
  return a > b ? a : b;
}
template <class T>
T smaller_of(T a, T b) {
  return a < b ? a : b;
}
inline unsigned or_of(unsigned a, unsigned b) { return a | b; }
inline unsigned and_of(unsigned a, unsigned b) { return a & b; }

// Lanes take the mask of those that brought the same value.
template <class T>
void match(const Lanes& lanes) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((lanes.mask >> lane & 1) == 0) continue;
    uint32_t same = 0;
    for (unsigned other = 0; other < kWarp; ++other)
      if (lanes.mask >> other & 1 && load<T>(*lanes.given[lane]) == load<T>(*lanes.given[other]))
        same |= 1u << other;
    (*lanes.taken[lane])[0] = same;
  }
}

}  // namespace cuda_emulation

#define CUDA_EMULATION_WHERE cuda_emulation::Where where = cuda_emulation::here()

template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = warpSize, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return shuffle<T, indexed_lane>(__func__, mask, value, lane, width, where);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = warpSize, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return shuffle<T, xor_lane>(__func__, mask, value, bits, width, where);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned distance, int width = warpSize,
                 CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return shuffle<T, lane_below>(__func__, mask, value, int(distance), width, where);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned distance, int width = warpSize,
                   CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return shuffle<T, lane_above>(__func__, mask, value, int(distance), width, where);
}
inline unsigned __ballot_sync(uint32_t mask, int predicate, CUDA_EMULATION_WHERE) {
  return cuda_emulation::ballot(__func__, mask, predicate, where);
}
inline int __any_sync(uint32_t mask, int predicate, CUDA_EMULATION_WHERE) {
  return cuda_emulation::ballot(__func__, mask, predicate, where) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, CUDA_EMULATION_WHERE) {
  return cuda_emulation::ballot(__func__, mask, predicate, where) == mask;
}
inline void __syncwarp(uint32_t mask = cuda_emulation::kAllLanes, CUDA_EMULATION_WHERE) {
  cuda_emulation::ballot(__func__, mask, 0, where);
}
template <class T>
T __reduce_add_sync(uint32_t mask, T value, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return reduced<T, sum_of<T>>(__func__, mask, value, where);
}
template <class T>
T __reduce_max_sync(uint32_t mask, T value, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return reduced<T, larger_of<T>>(__func__, mask, value, where);
}
template <class T>
T __reduce_min_sync(uint32_t mask, T value, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return reduced<T, smaller_of<T>>(__func__, mask, value, where);
}
inline unsigned __reduce_or_sync(uint32_t mask, unsigned value, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return reduced<unsigned, or_of>(__func__, mask, value, where);
}
inline unsigned __reduce_and_sync(uint32_t mask, unsigned value, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  return reduced<unsigned, and_of>(__func__, mask, value, where);
}
template <class T>
unsigned __match_any_sync(uint32_t mask, T value, CUDA_EMULATION_WHERE) {
  using namespace cuda_emulation;
  Payload given;
  store(given, value);
  return meet(mask, __func__, given, match<T>, where)[0];
}
