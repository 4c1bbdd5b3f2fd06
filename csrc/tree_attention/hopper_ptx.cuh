// What sm_90a has beside Ampere, as functions: barriers in shared memory, tensor copies, products
// of a warpgroup, clusters. Formats are those of the PTX ISA, sections "mbarrier",
// "cp.async.bulk.tensor", "wgmma" and "Matrix descriptor format". Emulated, a cluster is one block.
#pragma once

#include <cuda_runtime.h>
#if !defined(SPECDEC_CUDA_EMULATED)
#include <cuda.h>
#endif

#include <type_traits>

#include "tree_attention/products.cuh"

namespace specdec {

#if defined(SPECDEC_CUDA_EMULATED)
using TensorMap = cuda_emulation::TensorMap;
#else
using TensorMap = CUtensorMap;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
#if defined(SPECDEC_CUDA_EMULATED)
  return cuda_emulation::shared_offset(pointer);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// ---- barriers in shared memory

struct Barrier {
  uint64_t state;

  __device__ void init(unsigned arrivals) {
#if defined(SPECDEC_CUDA_EMULATED)
    cuda_emulation::init_barrier(&state, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(arrivals)
                 : "memory");
#endif
  }
  __device__ void arrive() {
#if defined(SPECDEC_CUDA_EMULATED)
    cuda_emulation::arrive_at_barrier(&state, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state))
                 : "memory");
#endif
  }
  // Arrives; the phase also waits for `bytes` of tensor copies.
  __device__ void expect(unsigned bytes) {
#if defined(SPECDEC_CUDA_EMULATED)
    cuda_emulation::arrive_at_barrier(&state, bytes);
#else
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
        "r"(bytes)
        : "memory");
#endif
  }
  // Until the phase of this parity is over; that before the first one has parity 1.
  __device__ void wait(unsigned parity) {
#if defined(SPECDEC_CUDA_EMULATED)
    cuda_emulation::wait_for_barrier(&state, parity, cuda_emulation::here());
#else
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&state)),
        "r"(parity)
        : "memory");
#endif
  }
};

// Makes initialised barriers visible to tensor copies and to the cluster.
__device__ __forceinline__ void publish_barriers() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Makes ordinary writes to shared memory visible to tensor copies and warpgroup products.
__device__ __forceinline__ void publish_shared() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Barrier of some warps of the block; 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::wait_at_barrier(id, threads, 0, true, cuda_emulation::here());
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// The block's barrier, in which threads may meet from different places.
__device__ __forceinline__ void block_barrier() { __syncthreads(); }

// ---- tensor copies

// A box of the tensor from (column, slot, head, batch or page) on.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap* map, Barrier& barrier,
                                         int column, int slot, int head, int batch) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::copy_box(shared, *map, &barrier.state, {column, slot, head, batch});
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(&barrier.state)), "r"(column), "r"(slot), "r"(head), "r"(batch)
      : "memory");
#endif
}

// ---- products of a warpgroup

// Operands are boxes of 64 columns (128 bytes) by any number of rows, with the 128-byte swizzle,
// which is that of TileLayout<Element, 64>; they start at multiples of 1024 bytes. Eight rows are
// 1024 bytes. `columns_stride` is the distance of boxes side by side, for an operand whose columns
// are M or N.
__device__ __forceinline__ uint64_t operand(const void* start, int columns_stride) {
  constexpr uint64_t kSwizzle128 = 1;
  const auto field = [](uint32_t bytes) { return uint64_t((bytes & 0x3ffff) >> 4); };
  return field(shared_address(start)) | field(columns_stride) << 16 | field(1024) << 32 |
         kSwizzle128 << 62;
}
// The operand `elements` further on: an addition that costs no register to keep.
template <class Element>
__device__ __forceinline__ uint64_t further(uint64_t operand, int elements) {
  return operand + elements * sizeof(Element) / 16;
}

// Products run on while their registers look free: keeps the compiler from reading or writing these
// across.
template <int kTiles, int kFragments>
__device__ __forceinline__ void pin([[maybe_unused]] Fragment (&fragments)[kTiles][kFragments]) {
#if !defined(SPECDEC_CUDA_EMULATED)
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (Fragment& fragment : fragments[tile])
#pragma unroll
      for (float& value : fragment.values) asm volatile("" : "+f"(value)::"memory");
#endif
}

// Before products that use registers written since the last ones.
__device__ __forceinline__ void begin_products() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void end_products() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_products() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

#if defined(SPECDEC_CUDA_EMULATED)

template <class Element>
constexpr cuda_emulation::Element kEmulated =
    std::is_same_v<Element, Half> ? cuda_emulation::Element::f16 : cuda_emulation::Element::bf16;
template <class Element>
void multiply_shared(Fragment* d, uint64_t a, uint64_t b, int adds) {
  cuda_emulation::multiply_shared(kEmulated<Element>, d->values, a, b, adds);
}
template <class Element>
void multiply_registers(Fragment* d, const uint32_t (&a)[4], uint64_t b) {
  cuda_emulation::multiply_registers(kEmulated<Element>, d->values, a, b, cuda_emulation::here());
}

#else

// The 32 registers of 8 fragments: a warp's 16 of the warpgroup's 64 rows.
#define SPECDEC_FRAGMENT(d, i) \
  "+f"((d)[i].values[0]), "+f"((d)[i].values[1]), "+f"((d)[i].values[2]), "+f"((d)[i].values[3])
#define SPECDEC_FRAGMENTS(d)                                                                      \
  SPECDEC_FRAGMENT(d, 0), SPECDEC_FRAGMENT(d, 1), SPECDEC_FRAGMENT(d, 2), SPECDEC_FRAGMENT(d, 3), \
      SPECDEC_FRAGMENT(d, 4), SPECDEC_FRAGMENT(d, 5), SPECDEC_FRAGMENT(d, 6),                     \
      SPECDEC_FRAGMENT(d, 7)
#define SPECDEC_REGISTERS                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

// D (+)= A B^T: A [64, 16] and B [64, 16] in shared memory, rows of 64 columns.
template <class Element>
__device__ __forceinline__ void multiply_shared(Fragment* d, uint64_t a, uint64_t b, int adds) {
#define SPECDEC_MULTIPLY_SHARED(type)                                                   \
  asm volatile(                                                                         \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " SPECDEC_REGISTERS \
      "%32, %33, adds, 1, 1, 0, 0;\n}"                                                  \
      : SPECDEC_FRAGMENTS(d)                                                            \
      : "l"(a), "l"(b), "r"(adds))
  if constexpr (std::is_same_v<Element, Half>) {
    SPECDEC_MULTIPLY_SHARED("f16");
  } else {
    SPECDEC_MULTIPLY_SHARED("bf16");
  }
#undef SPECDEC_MULTIPLY_SHARED
}

// D += A B: A [64, 16] in registers, B [16, 64] in shared memory, rows of 64 columns.
template <class Element>
__device__ __forceinline__ void multiply_registers(Fragment* d, const uint32_t (&a)[4],
                                                   uint64_t b) {
#define SPECDEC_MULTIPLY_REGISTERS(type)                                                \
  asm volatile(                                                                         \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " SPECDEC_REGISTERS \
      "{%32, %33, %34, %35}, %36, adds, 1, 1, 1;\n}"                                    \
      : SPECDEC_FRAGMENTS(d)                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))
  if constexpr (std::is_same_v<Element, Half>) {
    SPECDEC_MULTIPLY_REGISTERS("f16");
  } else {
    SPECDEC_MULTIPLY_REGISTERS("bf16");
  }
#undef SPECDEC_MULTIPLY_REGISTERS
}

#undef SPECDEC_FRAGMENT
#undef SPECDEC_FRAGMENTS
#undef SPECDEC_REGISTERS

#endif

// ---- clusters

// All threads of all blocks of the cluster; shared memory written before is visible after.
__device__ __forceinline__ void cluster_barrier() {
#if defined(SPECDEC_CUDA_EMULATED)
  named_barrier(15, blockDim.x);
#else
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// The address of a variable of this block in the block of another rank.
__device__ __forceinline__ uint32_t remote_address(const void* own, [[maybe_unused]] int rank) {
#if defined(SPECDEC_CUDA_EMULATED)
  return shared_address(own);
#else
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
#endif
}
__device__ __forceinline__ float read_remote(uint32_t address) {
  float value;
#if defined(SPECDEC_CUDA_EMULATED)
  std::memcpy(&value, cuda_emulation::dynamic_shared_memory() + address, sizeof(value));
#else
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}
__device__ __forceinline__ float4 read_remote_four(uint32_t address) {
  float4 v;
#if defined(SPECDEC_CUDA_EMULATED)
  std::memcpy(&v, cuda_emulation::dynamic_shared_memory() + address, sizeof(v));
#else
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
#endif
  return v;
}

// Registers per thread, for the whole warpgroup, from now on.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
#if !defined(SPECDEC_CUDA_EMULATED)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace specdec
