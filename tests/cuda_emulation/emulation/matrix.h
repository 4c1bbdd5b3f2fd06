// The instructions behind csrc/common/matrix.cuh, by the fragment layouts of the PTX ISA
// (warp-level matrix instructions). With group = lane / 4 and t = lane % 4, register r holds of
//   m16n8k16 A: row group + 8 (r % 2), columns 2 t + 8 (r / 2) and the next one
//   m16n8k16 B: rows 2 t + 8 r and the next one, column group
//   m16n8k8 A (tf32): row group + 8 (r % 2), column t + 4 (r / 2)
//   m16n8k8 B (tf32): row t + 4 r, column group
//   C and D: row group + 8 (r / 2), column 2 t + r % 2.
#pragma once

#include <cstdint>

#include "emulation/scheduler.h"

namespace cuda_emulation {

enum class Element { bf16, f16, tf32 };

float float_of_bf16(uint16_t bits);
float float_of_half(uint16_t bits);
uint16_t bf16_of(
    float value);  // rounds to nearest even, as all of CUDA's conversions do by default
uint16_t half_of(float value);

// D = A B + C, summed in fp32 from low k to high. `a` has four registers, `b` two.
void mma(Element element, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
         const float (&c)[4], Where where);

// Loads `matrices` (2 or 4) of 8 x 8 16-bit elements. Lane 8 m + i has the address of row i of
// matrix m; register m receives the pair at row lane / 4, columns 2 (lane % 4) and the next one, of
// the matrix or of its transpose.
void load_matrices(int matrices, bool transposed, uint32_t* registers, const void* row,
                   Where where);

}  // namespace cuda_emulation
