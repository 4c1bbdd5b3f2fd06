// How bindings see and make torch tensors without linking torch: through DLPack's C interface, or,
// with a torch that lacks it, the tensor's own Python methods. The checks here are the last line of
// defence against a wrong pointer; messages for users come from the public functions in
// specdec_kernels/ops.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/params.h"
#include "common/status.h"

namespace specdec {

namespace py = pybind11;

constexpr int kMaxDims = 5;

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};
  bool on_cpu = true;

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Reads a torch.Tensor; None gives an empty Tensor.
Tensor as_tensor(const py::handle& value);

// A new torch.Tensor on the CPU, contiguous, and how a kernel sees it.
struct NewTensor {
  py::object object;
  Tensor view;
};
NewTensor new_tensor(DType dtype, const int64_t* shape, int ndim);
inline NewTensor new_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  return new_tensor(dtype, shape.begin(), static_cast<int>(shape.size()));
}

template <int kCount>
std::array<Tensor, kCount> as_tensors(const py::sequence& values) {
  std::array<Tensor, kCount> tensors;
  for (int i = 0; i < kCount; ++i) tensors[i] = as_tensor(values[i]);
  return tensors;
}

void expect_dtype(const char* name, const Tensor& tensor, std::initializer_list<DType> allowed);
void expect_cpu(const char* name, const Tensor& tensor);
// -1 in shape accepts any size.
void expect_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape);
void expect_contiguous(const char* name, const Tensor& tensor);
// All three at once.
void expect_array(const char* name, const Tensor& tensor, DType dtype,
                  std::initializer_list<int64_t> shape);
// The last dimension has stride 1 (or at most one element).
void expect_dense_rows(const char* name, const Tensor& tensor);
// The leading dimensions of a tensor as one, of dense rows that lie a fixed distance apart.
struct Rows {
  int64_t count = 1;
  int64_t length = 0;
  int64_t stride = 0;
};
Rows rows_of(const char* name, const Tensor& tensor);
// Throws RuntimeError "OP: reason" unless status is ok.
void raise_unless_ok(const char* op, Status status);

}  // namespace specdec
