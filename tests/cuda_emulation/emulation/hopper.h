// The instructions behind csrc/tree_attention/hopper_ptx.cuh, by the PTX ISA: barriers in shared
// memory, tensor copies with the 128-byte swizzle, products of a warpgroup. A cluster is one block.
//
// Addresses in shared memory are offsets from the start of the dynamic part.
#pragma once

#include <cstdint>

#include "emulation/matrix.h"
#include "emulation/scheduler.h"

namespace cuda_emulation {

uint32_t shared_offset(const void* pointer);

// A barrier's word: arrivals per phase, arrivals and bytes that are missing, the phase's parity.
void init_barrier(uint64_t* word, unsigned arrivals);
void arrive_at_barrier(uint64_t* word, unsigned bytes_expected);
void wait_for_barrier(const uint64_t* word, unsigned parity, Where where);

// A tensor of 16-bit elements of rank 4, innermost dimension first.
struct TensorMap {
  const void* data;
  int64_t shape[4];
  int64_t stride[3];  // bytes, from the second dimension on
  int64_t box[2];     // of the first two dimensions
};
// Bytes land and the barrier knows of them at once.
void copy_box(void* shared, const TensorMap& map, uint64_t* barrier, const int (&at)[4]);

// D (+)= A B for 64 x 64 x 16, this lane's 32 values: fragments of 8 columns with rows lane / 4
// (values 0, 1) and lane / 4 + 8 (values 2, 3) of the warp's 16. Operands are descriptors.
void multiply_shared(Element element, float* d, uint64_t a, uint64_t b, bool adds);
// A as four registers of the warp's rows; rows of B hold columns of the result.
void multiply_registers(Element element, float* d, const uint32_t (&a)[4], uint64_t b, Where where);

}  // namespace cuda_emulation
