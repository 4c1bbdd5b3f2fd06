// Where the logits of one row come from: as they lie in memory, or edited on the way into
// registers.
//
// A source is read in vectors from `first` on, a multiple of kLanes. It is copied into every pass,
// as the edited one keeps a cursor.
#pragma once

#include "common/scratch.h"
#include "common/tree.h"
#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kEditScratch = 5;  // slot of thread_scratch

// count elements from source on (any count); the missing lanes hold fill.
template <class T>
SPECDEC_INLINE F32 load_upto(const T* source, int64_t count, float fill = -kInfinity) {
  if (count >= kLanes) return load(source);
  return load_partial(source, count > 0 ? int(count) : 0, fill);
}

template <class T>
class PlainSource {
 public:
  PlainSource(const T* data, int64_t size) : data_(data), size_(size) {}

  int64_t size() const { return size_; }
  SPECDEC_INLINE F32 vector(int64_t first, int64_t end) {
    return load_upto(data_ + first, end - first);
  }
  float value(int64_t id) const { return to_float(data_[id]); }

 private:
  const T* data_;
  int64_t size_;
};

// What happens to the logit of one token.
struct Edit {
  int64_t id;
  float bias;
  int32_t count;  // times generated; -1: not in the text
};

struct Penalties {
  float repetition, presence, frequency;

  float apply(float logit, const Edit& edit) const {
    logit = edit.bias == -kInfinity ? -kInfinity : logit + edit.bias;
    if (edit.count < 0) return logit;
    logit = logit < 0.0f ? logit * repetition : logit / repetition;
    if (edit.count == 0) return logit;
    logit = logit - frequency * float(edit.count);
    return logit - presence;
  }
};

struct EditList {
  const Edit* edits;
  int64_t size;

  const Edit* find(int64_t id) const {
    int64_t low = 0, high = size;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (edits[middle].id < id)
        low = middle + 1;
      else
        high = middle;
    }
    return low < size && edits[low].id == id ? edits + low : nullptr;
  }
};

template <class T>
class EditedSource {
 public:
  // The edits of `path` stand in place of those of `text` for the same token.
  EditedSource(const T* data, int64_t size, EditList text, EditList path, Penalties penalties,
               const int32_t* allowed)
      : data_(data), size_(size), lists_{text, path}, penalties_(penalties), allowed_(allowed) {
    restart();
  }

  int64_t size() const { return size_; }
  SPECDEC_INLINE F32 vector(int64_t first, int64_t end) {
    F32 logits = load_upto(data_ + first, end - first);
    if (first < reached_) restart();
    reached_ = first + kLanes;
    if (next_ < reached_) logits = edit(logits, first);
    return allowed_ == nullptr || first >= size_ ? logits : mask(logits, first);
  }
  float value(int64_t id) const {
    const Edit* edit = lists_[1].find(id);
    if (edit == nullptr) edit = lists_[0].find(id);
    if (allowed_ != nullptr && (uint32_t(allowed_[id / 32]) >> (id % 32) & 1u) == 0)
      return -kInfinity;
    const float logit = to_float(data_[id]);
    return edit == nullptr ? logit : penalties_.apply(logit, *edit);
  }

 private:
  void restart() {
    at_[0] = at_[1] = reached_ = 0;
    find_next();
  }
  void find_next() {
    const int64_t none = INT64_MAX;
    const int64_t text = at_[0] < lists_[0].size ? lists_[0].edits[at_[0]].id : none;
    const int64_t path = at_[1] < lists_[1].size ? lists_[1].edits[at_[1]].id : none;
    next_ = text < path ? text : path;
    list_ = text < path ? 0 : 1;
    both_ = text == path;
  }
  __attribute__((noinline)) F32 edit(F32 logits, int64_t first) {
    while (next_ < first + kLanes) {
      if (next_ >= first)
        logits[next_ - first] =
            penalties_.apply(logits[next_ - first], lists_[list_].edits[at_[list_]]);
      ++at_[list_];
      if (both_) ++at_[0];
      find_next();
    }
    return logits;
  }
  SPECDEC_INLINE F32 mask(F32 logits, int64_t first) const {
    U32 lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = uint32_t(lane);
    const U32 bits = (uint32_t(allowed_[first / 32]) >> (first % 32)) - U32{};
    const U32 allowed = bits >> lanes & 1u;
    return select(bit_cast<I32>(allowed) == 0, broadcast(-kInfinity), logits);
  }

  const T* data_;
  int64_t size_;
  EditList lists_[2];  // of the text, and of the drafted path
  Penalties penalties_;
  const int32_t* allowed_;
  int64_t at_[2];
  int64_t reached_;
  int64_t next_;  // the smaller id of those that the lists stand at
  int list_;
  bool both_;
};

// ---- the sources of a batch

template <class T>
class PlainRows {
 public:
  using Source = PlainSource<T>;

  PlainRows(const void* logits, int64_t stride_b, int64_t stride_t, int64_t vocab)
      : logits_(static_cast<const T*>(logits)),
        stride_b_(stride_b),
        stride_t_(stride_t),
        vocab_(vocab) {}

  int64_t vocab() const { return vocab_; }
  const T* row(int64_t b, int64_t slot) const { return logits_ + b * stride_b_ + slot * stride_t_; }
  Source source(int64_t b, int64_t slot) const { return Source(row(b, slot), vocab_); }

 private:
  const T* logits_;
  int64_t stride_b_, stride_t_, vocab_;
};

template <class T>
class EditedRows {
 public:
  using Source = EditedSource<T>;

  EditedRows(const PlainRows<T>& rows, const EditArrays& edits, const WindowArrays& window)
      : rows_(rows), edits_(edits), window_(window), words_((rows.vocab() + 31) / 32) {}

  // Lists the edits of every row and of every path. False when memory runs out.
  bool prepare() {
    const int64_t slots = window_.batch * window_.width;
    int64_t nodes = 0;
    for (int64_t b = 0; b < window_.batch && has_paths(); ++b) nodes += path_nodes(b);
    const size_t offsets = size_t(window_.batch + slots + 2) * sizeof(int64_t);
    const size_t room = size_t(window_.batch * edits_.num_tokens + nodes) * sizeof(Edit);
    char* memory = static_cast<char*>(thread_scratch(kEditScratch, offsets + room));
    if (memory == nullptr) return false;
    text_starts_ = reinterpret_cast<int64_t*>(memory);
    path_starts_ = text_starts_ + window_.batch + 1;
    list_ = reinterpret_cast<Edit*>(path_starts_ + slots + 1);
    int64_t end = 0;
    for (int64_t b = 0; b < window_.batch; ++b) {
      text_starts_[b] = end;
      end = append_text(b, end);
    }
    text_starts_[window_.batch] = end;
    for (int64_t b = 0; b < window_.batch; ++b) end = append_paths(b, end);
    path_starts_[slots] = end;
    return true;
  }

  int64_t vocab() const { return rows_.vocab(); }
  Source source(int64_t b, int64_t slot) const {
    const int64_t at = b * window_.width + slot;
    const Penalties penalties = {
        edits_.repetition_penalty == nullptr ? 1.0f : edits_.repetition_penalty[b],
        edits_.presence_penalty == nullptr ? 0.0f : edits_.presence_penalty[b],
        edits_.frequency_penalty == nullptr ? 0.0f : edits_.frequency_penalty[b]};
    return Source(rows_.row(b, slot), vocab(), text(b), path(at), penalties,
                  edits_.allowed_tokens == nullptr ? nullptr : edits_.allowed_tokens + at * words_);
  }

 private:
  // Whether drafted tokens change logits.
  bool has_paths() const {
    return window_.num_nodes != nullptr &&
           (edits_.repetition_penalty != nullptr || edits_.presence_penalty != nullptr ||
            edits_.frequency_penalty != nullptr);
  }
  EditList text(int64_t b) const {
    return {list_ + text_starts_[b], text_starts_[b + 1] - text_starts_[b]};
  }
  EditList path(int64_t at) const {
    return {list_ + path_starts_[at], path_starts_[at + 1] - path_starts_[at]};
  }

  // Upper bound of the edits that the paths of one row need.
  int64_t path_nodes(int64_t b) const {
    const Window window(window_, b);
    int64_t sum = 0;
    for (int64_t slot = 0; slot < window.num_nodes; ++slot)
      for (int64_t at = slot; at > 0; at = window.parent(at)) ++sum;
    return sum;
  }

  // The row's own list, ascending, every token once.
  int64_t append_text(int64_t b, int64_t end) {
    const int64_t begin = end;
    bool ordered = true;
    for (int64_t i = b * edits_.num_tokens; i < (b + 1) * edits_.num_tokens; ++i) {
      const int64_t id = edits_.token_ids[i];
      if (id < 0 || id >= vocab()) continue;
      list_[end] = {id, edits_.token_bias == nullptr ? 0.0f : edits_.token_bias[i],
                    edits_.token_counts == nullptr ? -1 : edits_.token_counts[i]};
      if (list_[end].count < -1) list_[end].count = -1;
      ordered = ordered && (end == begin || list_[end - 1].id < id);
      ++end;
    }
    return ordered ? end : begin + merge_equal(list_ + begin, end - begin);
  }

  // Sorts, keeping the order of equal ids, and adds those up.
  static int64_t merge_equal(Edit* edits, int64_t size) {
    for (int64_t i = 1; i < size; ++i) {
      const Edit edit = edits[i];
      int64_t at = i;
      for (; at > 0 && edits[at - 1].id > edit.id; --at) edits[at] = edits[at - 1];
      edits[at] = edit;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < size; ++i) {
      if (kept > 0 && edits[kept - 1].id == edits[i].id) {
        Edit& same = edits[kept - 1];
        same.bias = same.bias + edits[i].bias;
        if (same.count < 0 || edits[i].count < 0)
          same.count = same.count > edits[i].count ? same.count : edits[i].count;
        else
          same.count += edits[i].count;
      } else {
        edits[kept++] = edits[i];
      }
    }
    return kept;
  }

  // Every slot's list: its parent's, with its own token counted once more.
  int64_t append_paths(int64_t b, int64_t end) {
    for (int64_t slot = 0; slot < window_.width; ++slot) {
      path_starts_[b * window_.width + slot] = end;
      if (slot == 0 || !has_paths()) continue;
      const Window window(window_, b);
      if (slot >= window.num_nodes) continue;
      const int64_t parent = window.parent(slot);
      const EditList inherited = parent > 0 ? path(b * window_.width + parent) : EditList{list_, 0};
      end = append_path(b, window.tokens[slot], inherited, end);
    }
    return end;
  }
  int64_t append_path(int64_t b, int64_t token, EditList inherited, int64_t end) {
    bool placed = token < 0 || token >= vocab();
    for (int64_t i = 0; i < inherited.size; ++i) {
      Edit edit = inherited.edits[i];
      if (!placed && token <= edit.id) {
        placed = true;
        if (token == edit.id)
          ++edit.count;
        else
          list_[end++] = first_use(b, token);
      }
      list_[end++] = edit;
    }
    if (!placed) list_[end++] = first_use(b, token);
    return end;
  }
  Edit first_use(int64_t b, int64_t token) const {
    const Edit* known = text(b).find(token);
    if (known == nullptr) return {token, 0.0f, 1};
    return {token, known->bias, (known->count > 0 ? known->count : 0) + 1};
  }

  PlainRows<T> rows_;
  EditArrays edits_;
  WindowArrays window_;
  int64_t words_;
  int64_t* text_starts_ = nullptr;
  int64_t* path_starts_ = nullptr;
  Edit* list_ = nullptr;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
