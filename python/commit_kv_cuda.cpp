#include "commit_kv/commit_kv.h"

#include "cuda.h"

namespace specdec {

// `table` holds the addresses of n cache tensors, then their n * 4 sizes, then their n * 4 strides.
void bind_commit_kv_cuda(py::module_& m) {
  m.def("commit_kv", [](const py::object& table, int64_t item_size, const py::object& path,
                        const py::object& num_kept, const py::object& prefix_len,
                        const py::object& block_table, int device, std::uintptr_t stream) {
    const Tensor table_t = as_tensor(table), path_t = as_tensor(path);
    const Tensor kept_t = as_tensor(num_kept), prefix_t = as_tensor(prefix_len);
    const Tensor pages_t = as_tensor(block_table);
    expect_dtype("commit_kv_: the table of caches", table_t, {DType::i64});
    expect_contiguous("commit_kv_: the table of caches", table_t);
    const int64_t n = table_t.shape[0] / 9;
    CommitKvParams params{};
    params.caches = table_t.as<void*>();
    params.shapes = table_t.as<int64_t>() + n;
    params.strides = table_t.as<int64_t>() + 5 * n;
    params.num_caches = n;
    params.item_size = item_size;
    params.path = path_t.as<int32_t>();
    params.path_stride = path_t.stride[0];
    params.num_kept = kept_t.as<int32_t>();
    params.prefix_len = prefix_t.as<int32_t>();
    params.batch = kept_t.shape[0];
    params.block_table = pages_t.as<int32_t>();
    params.block_table_stride = pages_t.stride[0];
    py::gil_scoped_release release;
    raise_if_cuda_error("commit_kv_", commit_kv_cuda(params, cuda_launch(device, stream)));
  });
}

}  // namespace specdec
