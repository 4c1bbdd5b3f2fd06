// Warp-level matrix products of the tensor cores (from sm_80 on) and the loads that feed them. All
// lanes of a warp call together. Layouts: PTX ISA, "Warp-level matrix instructions"; in short, with
// group = lane / 4 and t = lane % 4, in tests/cuda_emulation/emulation/matrix.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/params.h"

namespace specdec {

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane 8 m + i gives the address of row
// i of matrix m (16 bytes, aligned), registers[m] receives this lane's pair of matrix m.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&registers)[4], const void* row) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::load_matrices(4, false, registers, row, cuda_emulation::here());
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
#endif
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&registers)[4], const void* row) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::load_matrices(4, true, registers, row, cuda_emulation::here());
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
#endif
}

// Two matrices; the addresses of lanes 16 and up are not used.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&registers)[2], const void* row) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::load_matrices(2, false, registers, row, cuda_emulation::here());
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
#endif
}

__device__ __forceinline__ void ldmatrix_x2_transposed(uint32_t (&registers)[2], const void* row) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::load_matrices(2, true, registers, row, cuda_emulation::here());
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
#endif
}

// D += A B with A 16 x 16, B 16 x 8 of T (BFloat16 or Half), D in fp32.
template <class T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4],
                                          const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_16816<BFloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[2]) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::mma(cuda_emulation::Element::bf16, d, a, b, d, cuda_emulation::here());
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

template <>
__device__ __forceinline__ void mma_16816<Half>(float (&d)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2]) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::mma(cuda_emulation::Element::f16, d, a, b, d, cuda_emulation::here());
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// D += A B with A 16 x 8, B 8 x 8 of tf32: bits of fp32 of which the low 13 are ignored.
__device__ __forceinline__ void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::mma(cuda_emulation::Element::tf32, d, a, b, d, cuda_emulation::here());
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace specdec
