// Atomics. Threads take turns only where they wait, so a plain update is atomic; under a random
// schedule others may come in between two of them.
#pragma once

#include "emulation/scheduler.h"

namespace cuda_emulation {

template <class T>
struct Same {
  using Type = T;
};
template <class T>
using SameAs = typename Same<T>::Type;  // the pointer alone decides the type, as in CUDA

template <class T, class Update>
T update(T* address, Update update) {
  maybe_yield();
  const T old = *address;
  *address = update(old);
  return old;
}

}  // namespace cuda_emulation

template <class T>
T atomicAdd(T* address, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T old) { return T(old + value); });
}
template <class T>
T atomicMax(T* address, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T old) { return value > old ? value : old; });
}
template <class T>
T atomicMin(T* address, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T old) { return value < old ? value : old; });
}
template <class T>
T atomicOr(T* address, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T old) { return T(old | value); });
}
template <class T>
T atomicAnd(T* address, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T old) { return T(old & value); });
}
template <class T>
T atomicExch(T* address, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T) { return value; });
}
template <class T>
T atomicCAS(T* address, cuda_emulation::SameAs<T> expected, cuda_emulation::SameAs<T> value) {
  return cuda_emulation::update(address, [&](T old) { return old == expected ? value : old; });
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
