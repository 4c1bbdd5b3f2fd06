#pragma once

namespace specdec {

// What a kernel launch reports; the binding turns everything but ok into an exception.
enum class Status { ok = 0, unsupported_dtype = 1, unsupported_shape = 2, out_of_memory = 3 };

inline const char* status_text(Status status) {
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::unsupported_dtype:
      return "this kernel has no implementation for the given dtype";
    case Status::unsupported_shape:
      return "this kernel has no implementation for the given shape";
    case Status::out_of_memory:
      return "out of memory";
  }
  return "unknown status";
}

}  // namespace specdec
