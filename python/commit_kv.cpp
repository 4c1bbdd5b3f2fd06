#include "commit_kv/commit_kv.h"

#include <vector>

#include "tensor.h"

namespace specdec {

void bind_commit_kv(py::module_& m) {
  m.def("commit_kv",
        [](const py::list& caches, const py::object& path, const py::object& num_kept,
           const py::object& prefix_len, const py::object& block_table, int num_threads) {
          const Tensor path_t = as_tensor(path), kept_t = as_tensor(num_kept);
          const Tensor prefix_t = as_tensor(prefix_len), table_t = as_tensor(block_table);
          std::vector<void*> pointers;
          std::vector<int64_t> shapes, strides;
          int64_t bytes = 0;
          for (const py::handle& item : caches) {
            const Tensor cache = as_tensor(item);
            expect_shape("commit_kv_: a cache", cache, {-1, -1, -1, -1});
            expect_dense_rows("commit_kv_: a cache", cache);
            pointers.push_back(cache.data);
            shapes.insert(shapes.end(), cache.shape, cache.shape + 4);
            strides.insert(strides.end(), cache.stride, cache.stride + 4);
            bytes = item_size(cache.dtype);
          }
          const CommitKvParams params{pointers.data(),
                                      shapes.data(),
                                      strides.data(),
                                      int64_t(pointers.size()),
                                      bytes,
                                      path_t.as<int32_t>(),
                                      path_t.stride[0],
                                      kept_t.as<int32_t>(),
                                      prefix_t.as<int32_t>(),
                                      kept_t.shape[0],
                                      table_t.as<int32_t>(),
                                      table_t.stride[0],
                                      num_threads};
          py::gil_scoped_release release;
          commit_kv_cpu(params);
        });
}

}  // namespace specdec
