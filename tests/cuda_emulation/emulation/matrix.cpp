#include "emulation/matrix.h"

#include <cmath>
#include <cstring>

#include "emulation/intrinsics.h"
#include "emulation/warp.h"

namespace cuda_emulation {

float float_of_bf16(uint16_t bits) { return bits_of<float>(uint32_t(bits) << 16); }

uint16_t bf16_of(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = bits_of<uint32_t>(value);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float magnitude;
  if (exponent == 31)
    magnitude = mantissa == 0 ? INFINITY : NAN;
  else if (exponent == 0)
    magnitude = std::ldexp(float(mantissa), -24);
  else
    magnitude = std::ldexp(float(1024 + mantissa), exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

uint16_t half_of(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude == 0.0f) return sign;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int scale = exponent < -13 ? -24 : exponent - 11;  // of the last place
  const long units = std::lrint(std::ldexp(magnitude, -scale));
  // A mantissa that rounds up to 2048 carries into the exponent by itself.
  return sign | uint16_t(scale == -24 ? units : ((scale + 24) << 10) + units);
}

namespace {

struct Operands {
  uint32_t a[4], b[2];
  float c[4];
};

template <Element element>
float pair_half(uint32_t pair, int which) {
  const uint16_t bits = uint16_t(which == 0 ? pair : pair >> 16);
  return element == Element::bf16 ? float_of_bf16(bits) : float_of_half(bits);
}

// Only 10 bits of the mantissa count.
float float_of_tf32(uint32_t bits) { return bits_of<float>(bits & 0xffffe000u); }

template <Element element>
float a_of(const Operands* lanes, int row, int k) {
  if (element == Element::tf32)
    return float_of_tf32(lanes[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]);
  return pair_half<element>(lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2);
}

template <Element element>
float b_of(const Operands* lanes, int k, int column) {
  if (element == Element::tf32) return float_of_tf32(lanes[column * 4 + k % 4].b[k / 4]);
  return pair_half<element>(lanes[column * 4 + k % 8 / 2].b[k / 8], k % 2);
}

template <Element element>
void multiply(const Lanes& meeting) {
  Operands lanes[kWarp];
  for (unsigned i = 0; i < kWarp; ++i) lanes[i] = load<Operands>(*meeting.given[i]);
  constexpr int kDepth = element == Element::tf32 ? 8 : 16;
  float a[16][kDepth], b[kDepth][8];
  for (int k = 0; k < kDepth; ++k) {
    for (int row = 0; row < 16; ++row) a[row][k] = a_of<element>(lanes, row, k);
    for (int column = 0; column < 8; ++column) b[k][column] = b_of<element>(lanes, k, column);
  }
  for (unsigned i = 0; i < kWarp; ++i) {
    for (int r = 0; r < 4; ++r) {
      const int row = int(i) / 4 + r / 2 * 8, column = int(i) % 4 * 2 + r % 2;
      float sum = lanes[i].c[r];
      for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
      store(*meeting.taken[i], sum, r * sizeof(float));
    }
  }
}

// A lane's address of a row, and how the matrices are wanted.
struct Request {
  const uint16_t* row;
  int matrices;
  bool transposed;
};

void load_fragments(const Lanes& meeting) {
  const Request wanted = load<Request>(*meeting.given[0]);
  uint16_t values[4][8][8] = {};
  for (int m = 0; m < wanted.matrices; ++m)
    for (int row = 0; row < 8; ++row)
      std::memcpy(values[m][row], load<Request>(*meeting.given[m * 8 + row]).row, 16);
  for (unsigned i = 0; i < kWarp; ++i) {
    for (int m = 0; m < wanted.matrices; ++m) {
      const int row = int(i) / 4, column = int(i) % 4 * 2;
      const auto& matrix = values[m];
      const uint32_t low = wanted.transposed ? matrix[column][row] : matrix[row][column];
      const uint32_t high = wanted.transposed ? matrix[column + 1][row] : matrix[row][column + 1];
      (*meeting.taken[i])[m] = low | high << 16;
    }
  }
}

}  // namespace

void mma(Element element, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
         const float (&c)[4], Where where) {
  Operands operands;
  std::memcpy(operands.a, a, sizeof(a));
  std::memcpy(operands.b, b, sizeof(b));
  std::memcpy(operands.c, c, sizeof(c));
  Payload given;
  store(given, operands);
  Payload taken;
  if (element == Element::bf16)
    taken = meet(kAllLanes, "mma.bf16", given, multiply<Element::bf16>, where);
  else if (element == Element::f16)
    taken = meet(kAllLanes, "mma.f16", given, multiply<Element::f16>, where);
  else
    taken = meet(kAllLanes, "mma.tf32", given, multiply<Element::tf32>, where);
  std::memcpy(d, taken.data(), sizeof(d));
}

void load_matrices(int matrices, bool transposed, uint32_t* registers, const void* row,
                   Where where) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    throw Fault("ldmatrix from a misaligned address at " + where.text());
  Payload given;
  store(given, Request{static_cast<const uint16_t*>(row), matrices, transposed});
  const Payload taken = meet(kAllLanes, "ldmatrix", given, load_fragments, where);
  std::memcpy(registers, taken.data(), matrices * sizeof(uint32_t));
}

}  // namespace cuda_emulation
