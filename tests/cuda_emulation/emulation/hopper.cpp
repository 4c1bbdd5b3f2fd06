#include "emulation/hopper.h"

#include <cstring>

#include "emulation/warp.h"

namespace cuda_emulation {
namespace {

constexpr int kRowBytes = 128;      // of a box with the 128-byte swizzle
constexpr int kPatience = 1 << 20;  // turns of one thread that waits

struct BarrierWord {
  uint8_t arrivals, missing, parity, unused;
  int32_t bytes;
};
static_assert(sizeof(BarrierWord) == sizeof(uint64_t));

void end_phase_if_complete(BarrierWord& barrier) {
  if (barrier.missing > 0 || barrier.bytes > 0) return;
  barrier.missing = barrier.arrivals;
  barrier.parity ^= 1;
}

BarrierWord& word_of(uint64_t* word) { return *reinterpret_cast<BarrierWord*>(word); }

// The 16-byte chunks of 128 bytes change places with the row, which the address tells.
uint32_t swizzled(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

float float_of(Element element, uint16_t bits) {
  return element == Element::bf16 ? float_of_bf16(bits) : float_of_half(bits);
}

struct Operand {
  uint32_t start, leading, stride;
  explicit Operand(uint64_t descriptor)
      : start(uint32_t(descriptor & 0x3fff) << 4),
        leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        stride(uint32_t(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) throw Fault("operand of a warpgroup: expected the 128-byte swizzle");
  }
  static float read(Element element, uint32_t offset) {
    uint16_t bits;
    std::memcpy(&bits, dynamic_shared_memory() + swizzled(offset), sizeof(bits));
    return float_of(element, bits);
  }
  // Rows of the operand are M or N, a row holds the elements that are summed over.
  float by_row(Element element, int row, int k) const {
    return read(element, start + row / 8 * stride + row % 8 * kRowBytes + k * 2);
  }
  // Rows hold M or N.
  float by_column(Element element, int column, int k) const {
    return read(element, start + k / 8 * stride + k % 8 * kRowBytes + column / 64 * leading +
                             column % 64 * 2);
  }
};

unsigned lane() { return threadIdx.x % kWarp; }

}  // namespace

uint32_t shared_offset(const void* pointer) {
  return uint32_t(static_cast<const unsigned char*>(pointer) - dynamic_shared_memory());
}

void init_barrier(uint64_t* word, unsigned arrivals) {
  word_of(word) = {uint8_t(arrivals), uint8_t(arrivals), 0, 0, 0};
}
void arrive_at_barrier(uint64_t* word, unsigned bytes_expected) {
  BarrierWord& barrier = word_of(word);
  if (barrier.missing == 0) throw Fault("more arrivals at a barrier than it was made for");
  barrier.bytes += int32_t(bytes_expected);
  --barrier.missing;
  end_phase_if_complete(barrier);
}
void wait_for_barrier(const uint64_t* word, unsigned parity, Where where) {
  const BarrierWord& barrier = *reinterpret_cast<const BarrierWord*>(word);
  for (int turn = 0; barrier.parity == parity; ++turn) {
    if (turn == kPatience) throw Fault("waits without end at " + where.text());
    let_others_go();
  }
}

void copy_box(void* shared, const TensorMap& map, uint64_t* word, const int (&at)[4]) {
  uint32_t offset = shared_offset(shared);
  if (offset % 1024 != 0) throw Fault("a box must start at 1024 bytes");
  for (int64_t row = 0; row < map.box[1]; ++row) {
    for (int64_t column = 0; column < map.box[0]; ++column, offset += 2) {
      const int64_t index[4] = {at[0] + column, at[1] + row, at[2], at[3]};
      const char* source = static_cast<const char*>(map.data) + 2 * index[0];
      bool inside = true;
      for (int i = 0; i < 4; ++i) {
        inside = inside && index[i] >= 0 && index[i] < map.shape[i];
        if (i > 0) source += index[i] * map.stride[i - 1];
      }
      uint16_t bits = 0;
      if (inside) std::memcpy(&bits, source, sizeof(bits));
      std::memcpy(dynamic_shared_memory() + swizzled(offset), &bits, sizeof(bits));
    }
  }
  BarrierWord& barrier = word_of(word);
  barrier.bytes -= int32_t(map.box[0] * map.box[1] * 2);
  end_phase_if_complete(barrier);
}

void multiply_shared(Element element, float* d, uint64_t a, uint64_t b, bool adds) {
  const Operand left(a), right(b);
  const int first_row = threadIdx.x / kWarp % 4 * 16 + lane() / 4;
  for (int i = 0; i < 32; ++i) {
    const int row = first_row + i % 4 / 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = adds ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += left.by_row(element, row, k) * right.by_row(element, column, k);
    d[i] = sum;
  }
}

void multiply_registers(Element element, float* d, const uint32_t (&a)[4], uint64_t b,
                        Where where) {
  const Operand right(b);
  float left[2][16];  // of this lane's two rows, from the four lanes that hold them
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = shuffle<uint32_t, indexed_lane>("wgmma", kAllLanes, a[i],
                                                            int(lane() / 4 * 4 + t), 32, where);
      const int k = 2 * t + i / 2 * 8;
      left[i % 2][k] = float_of(element, uint16_t(pair));
      left[i % 2][k + 1] = float_of(element, uint16_t(pair >> 16));
    }
  }
  for (int i = 0; i < 32; ++i) {
    const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) d[i] += left[i % 4 / 2][k] * right.by_column(element, column, k);
  }
}

}  // namespace cuda_emulation
