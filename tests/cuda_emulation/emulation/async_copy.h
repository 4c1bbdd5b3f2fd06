// The instructions behind csrc/common/async_copy.cuh. A copy lands as late as it may.
#pragma once

#include "emulation/scheduler.h"

namespace cuda_emulation {

inline void cp_async_16(void* shared, const void* global, bool reads) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0)
    throw Fault("cp.async to a misaligned address");
  if (reads && reinterpret_cast<uintptr_t>(global) % 16 != 0)
    throw Fault("cp.async from a misaligned address");
  begin_copy(shared, global, 16, reads ? 16 : 0);
}

}  // namespace cuda_emulation
