#include "dlpack.h"

#include <cstdlib>
#include <new>

namespace specdec {
namespace dlpack {
namespace {

// The C interface of DLPack 1.x: https://dmlc.github.io/dlpack/latest/c_api.html

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpu = 1;
enum : uint8_t { kInt = 0, kFloat = 2, kBFloat = 4 };

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, index;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Description {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Description tensor;
};

// What `torch.Tensor.__dlpack_c_exchange_api__` points to. Functions return 0, or -1 with a Python
// exception set.
struct ExchangeApi {
  Version version;
  ExchangeApi* older;
  int (*allocate)(Description* like, ManagedTensor** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensor** out);
  int (*import_managed)(ManagedTensor* tensor, void** object);
  int (*view)(void* object, Description* out);  // may be nullptr
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
};

struct Exchange {
  PyTypeObject* tensor = nullptr;  // the types whose objects the functions take
  PyTypeObject* parameter = nullptr;
  const ExchangeApi* api = nullptr;  // nullptr: torch has none that we know
};

const Exchange& exchange() {
  static const Exchange found = [] {
    Exchange e;
    const py::module_ torch = py::module_::import("torch");
    const py::object type = torch.attr("Tensor");
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return e;
    const auto* api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->version.major != kMajorVersion || api->view == nullptr) return e;
    e.tensor = reinterpret_cast<PyTypeObject*>(type.ptr());
    e.parameter = reinterpret_cast<PyTypeObject*>(torch.attr("nn").attr("Parameter").ptr());
    e.api = api;
    return e;
  }();
  return found;
}

constexpr DataType data_type(DType dtype) {
  return dtype == DType::f32    ? DataType{kFloat, 32, 1}
         : dtype == DType::bf16 ? DataType{kBFloat, 16, 1}
         : dtype == DType::f16  ? DataType{kFloat, 16, 1}
         : dtype == DType::i32  ? DataType{kInt, 32, 1}
                                : DataType{kInt, 64, 1};
}

// A tensor's memory, and what torch is told of it, in one allocation.
struct alignas(64) Memory {
  ManagedTensor managed;
  int64_t shape[kMaxDims];
  int64_t stride[kMaxDims];
};

}  // namespace

bool available() { return exchange().api != nullptr; }

bool view(const py::handle& value, Tensor* tensor) {
  const Exchange& e = exchange();
  const PyTypeObject* type = Py_TYPE(value.ptr());
  if (e.api == nullptr || (type != e.tensor && type != e.parameter)) return false;
  Description seen;
  if (e.api->view(value.ptr(), &seen) != 0) throw py::error_already_set();
  if (seen.ndim > kMaxDims) return false;
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64}) {
    const DataType known = data_type(dtype);
    if (known.code != seen.dtype.code || known.bits != seen.dtype.bits) continue;
    tensor->dtype = dtype;
    tensor->data = static_cast<char*>(seen.data) + seen.byte_offset;
    tensor->on_cpu = seen.device.type == kCpu;
    tensor->ndim = seen.ndim;
    for (int i = 0; i < seen.ndim; ++i) {
      tensor->shape[i] = seen.shape[i];
      tensor->stride[i] = seen.strides[i];
    }
    return true;
  }
  return false;
}

NewTensor new_tensor(DType dtype, const int64_t* shape, int ndim) {
  int64_t bytes = data_type(dtype).bits / 8;
  for (int i = 0; i < ndim; ++i) bytes *= shape[i];
  void* allocated = nullptr;
  if (posix_memalign(&allocated, alignof(Memory), sizeof(Memory) + bytes) != 0)
    throw std::bad_alloc();
  Memory* memory = new (allocated) Memory{};
  NewTensor result;
  Tensor& view = result.view;
  view.data = memory + 1;
  view.dtype = dtype;
  view.ndim = ndim;
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    view.shape[i] = memory->shape[i] = shape[i];
    view.stride[i] = memory->stride[i] = stride;
    stride *= shape[i];
  }
  memory->managed = {
      {kMajorVersion, 0},
      nullptr,
      [](ManagedTensor* self) { std::free(self); },
      0,
      {view.data, {kCpu, 0}, ndim, data_type(dtype), memory->shape, memory->stride, 0}};
  void* object = nullptr;
  if (exchange().api->import_managed(&memory->managed, &object) != 0) {
    std::free(memory);
    throw py::error_already_set();
  }
  result.object = py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
  return result;
}

}  // namespace dlpack
}  // namespace specdec
