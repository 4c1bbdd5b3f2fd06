// Plain types that the Params structs of all ops share. Strides count elements, not bytes.
#pragma once

#include <cstdint>

namespace specdec {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i32 = 3, i64 = 4 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i64:
      return 8;
    default:
      return 4;
  }
}

}  // namespace specdec
