#include "tensor.h"

#include "dlpack.h"

namespace specdec {
namespace {

struct TorchDTypes {
  py::object f32, bf16, f16, i32, i64;
};

// Attribute names as Python strings made once: a call reads up to twenty attributes.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
};

const Names& names() {
  static const Names* value = new Names;
  return *value;
}

py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object attribute(const py::handle& value, PyObject* name) {
  return checked(PyObject_GetAttr(value.ptr(), name));
}

py::object call_method(const py::handle& value, PyObject* name) {
  return checked(PyObject_CallMethodNoArgs(value.ptr(), name));
}

const TorchDTypes& torch_dtypes() {
  static const TorchDTypes* dtypes = [] {
    py::module_ torch = py::module_::import("torch");
    return new TorchDTypes{torch.attr("float32"), torch.attr("bfloat16"), torch.attr("float16"),
                           torch.attr("int32"), torch.attr("int64")};
  }();
  return *dtypes;
}

DType as_dtype(const py::object& dtype) {
  const TorchDTypes& known = torch_dtypes();
  if (dtype.is(known.f32)) return DType::f32;
  if (dtype.is(known.bf16)) return DType::bf16;
  if (dtype.is(known.f16)) return DType::f16;
  if (dtype.is(known.i32)) return DType::i32;
  if (dtype.is(known.i64)) return DType::i64;
  throw py::type_error("no kernel takes " + std::string(py::str(dtype)));
}

py::object torch_dtype(DType dtype) {
  const TorchDTypes& known = torch_dtypes();
  switch (dtype) {
    case DType::f32:
      return known.f32;
    case DType::bf16:
      return known.bf16;
    case DType::f16:
      return known.f16;
    case DType::i32:
      return known.i32;
    case DType::i64:
      break;
  }
  return known.i64;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
  }
  return "?";
}

std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i)
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("*") : std::to_string(shape[i]));
  return text + "]";
}

int64_t item(const py::handle& tuple, int index) {
  return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), index));
}

}  // namespace

Tensor as_tensor(const py::handle& value) {
  Tensor tensor;
  if (value.is_none() || dlpack::view(value, &tensor)) return tensor;
  if (!PyObject_HasAttr(value.ptr(), names().data_ptr))
    throw py::type_error("expected a torch.Tensor, got " +
                         std::string(Py_TYPE(value.ptr())->tp_name));
  const py::object pointer = call_method(value, names().data_ptr);
  tensor.data = PyLong_AsVoidPtr(pointer.ptr());
  tensor.dtype = as_dtype(attribute(value, names().dtype));
  tensor.on_cpu = attribute(value, names().is_cpu).ptr() == Py_True;
  const py::object shape = attribute(value, names().shape);
  const py::object stride = call_method(value, names().stride);
  tensor.ndim = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
  if (tensor.ndim > kMaxDims) throw py::value_error("a tensor has more than 5 dimensions");
  for (int i = 0; i < tensor.ndim; ++i) {
    tensor.shape[i] = item(shape, i);
    tensor.stride[i] = item(stride, i);
  }
  return tensor;
}

NewTensor new_tensor(DType dtype, const int64_t* shape, int ndim) {
  if (dlpack::available()) return dlpack::new_tensor(dtype, shape, ndim);
  py::tuple sizes(ndim);
  for (int i = 0; i < ndim; ++i) sizes[i] = shape[i];
  static const py::object* empty = new py::object(py::module_::import("torch").attr("empty"));
  py::object object = (*empty)(sizes, py::arg("dtype") = torch_dtype(dtype));
  const Tensor view = as_tensor(object);
  return {std::move(object), view};
}

void expect_cpu(const char* name, const Tensor& tensor) {
  if (!tensor.on_cpu) throw py::type_error(std::string(name) + ": expected a tensor on the CPU");
}

void expect_dtype(const char* name, const Tensor& tensor, std::initializer_list<DType> allowed) {
  std::string wanted;
  for (DType dtype : allowed) {
    if (tensor.dtype == dtype) return;
    wanted += (wanted.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  }
  throw py::type_error(std::string(name) + ": expected " + wanted + ", got " +
                       dtype_name(tensor.dtype));
}

void expect_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) {
  bool matches = tensor.ndim == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t size : shape) {
    matches = matches && (size < 0 || tensor.shape[i] == size);
    ++i;
  }
  if (matches) return;
  throw py::value_error(std::string(name) + ": expected shape " +
                        shape_text(shape.begin(), static_cast<int>(shape.size())) + ", got " +
                        shape_text(tensor.shape, tensor.ndim));
}

void expect_contiguous(const char* name, const Tensor& tensor) {
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] == 0) return;
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.stride[i] != stride)
      throw py::value_error(std::string(name) + ": expected a contiguous tensor");
    stride *= tensor.shape[i];
  }
}

void expect_array(const char* name, const Tensor& tensor, DType dtype,
                  std::initializer_list<int64_t> shape) {
  expect_dtype(name, tensor, {dtype});
  expect_shape(name, tensor, shape);
  expect_contiguous(name, tensor);
}

void expect_dense_rows(const char* name, const Tensor& tensor) {
  const int last = tensor.ndim - 1;
  if (last >= 0 && tensor.shape[last] > 1 && tensor.stride[last] != 1)
    throw py::value_error(std::string(name) + ": expected a last dimension of stride 1");
}

Rows rows_of(const char* name, const Tensor& tensor) {
  const auto fail = [&](const char* expected) {
    throw py::value_error(std::string(name) + ": expected " + expected);
  };
  if (tensor.ndim == 0) fail("at least one dimension");
  expect_dense_rows(name, tensor);
  Rows rows;
  rows.length = tensor.shape[tensor.ndim - 1];
  for (int i = 0; i + 1 < tensor.ndim; ++i)
    if (tensor.shape[i] == 0) rows.count = 0;
  if (rows.count == 0) return rows;
  for (int i = tensor.ndim - 2; i >= 0; --i) {
    if (tensor.shape[i] == 1) continue;
    if (rows.count == 1) rows.stride = tensor.stride[i];
    if (tensor.stride[i] != rows.stride * rows.count) fail("rows a fixed distance apart");
    rows.count *= tensor.shape[i];
  }
  return rows;
}

void raise_unless_ok(const char* op, Status status) {
  if (status != Status::ok) throw std::runtime_error(std::string(op) + ": " + status_text(status));
}

}  // namespace specdec
