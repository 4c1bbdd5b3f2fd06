#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>

namespace specdec {

// A growing array of plain data. It grows by a quarter through realloc, which moves pages, not
// bytes, where the system can: a large one never copies itself in the middle of a step.
template <class T>
class Pool {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() { std::free(data_); }

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return capacity_ * sizeof(T); }

  // `count` more elements, not initialised; where the first of them is.
  std::size_t add(std::size_t count) {
    const std::size_t first = size_;
    if (size_ + count > capacity_) grow(size_ + count);
    size_ += count;
    return first;
  }

 private:
  void grow(std::size_t needed) {
    const std::size_t more = capacity_ + capacity_ / 4;
    const std::size_t capacity = needed > more ? needed : more;
    void* data = std::realloc(static_cast<void*>(data_), capacity * sizeof(T));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace specdec
