// Plain types that the sampling ops share. Arrays are contiguous unless a stride is given.
#pragma once

#include <cstdint>

namespace specdec {

// One stream of random numbers per use.
enum Stream : uint32_t {
  kAcceptStream = 0,
  kResidualStream = 1,
  kBonusStream = 2,
  kDraftStream = 3
};

// Bits of Acceptance.status.
enum RowStatus : int32_t { kRowOk = 0, kRowNan = 1, kRowEmpty = 2 };

// What changes logits before the temperature; any pointer may be null. [rows] unless said
// otherwise.
struct EditArrays {
  const int64_t* token_ids;     // [rows, num_tokens]
  const float* token_bias;      // [rows, num_tokens]
  const int32_t* token_counts;  // [rows, num_tokens]
  int64_t num_tokens;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const int32_t* allowed_tokens;  // [rows, width, ceil(vocab / 32)]

  bool any() const {
    return token_bias != nullptr || repetition_penalty != nullptr || presence_penalty != nullptr ||
           frequency_penalty != nullptr || allowed_tokens != nullptr;
  }
};

// One value per row of the batch.
struct SamplingArrays {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* position;
  const int64_t* step;
  EditArrays edits;
};

// The verify window: slot 0 is the root.
struct WindowArrays {
  const int64_t* draft_token_ids;  // [batch, width]
  const int32_t* parents;          // [batch, width]
  const int32_t* num_nodes;        // [batch]
  int64_t batch;
  int64_t width;
};

struct AcceptanceArrays {
  int32_t* path;              // [batch, width]
  int32_t* num_accepted;      // [batch]
  int64_t* output_token_ids;  // [batch, width]
  int32_t* status;            // [batch]
};

}  // namespace specdec
