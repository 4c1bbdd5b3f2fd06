// A fiber: a function with a stack of its own that can be left in the middle and taken up again.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_emulation {

// All fibers are resumed by the same thread, the one that runs the kernel.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls entry() from the start, whatever the fiber was doing.
  void restart(void (*entry)());
  // Runs until the fiber suspends itself or its entry returns.
  void resume();
  // Of the fiber that runs: back to whoever resumed it.
  static void suspend();

 private:
  static void begin();
  void switch_to_host(bool forever);

  char* memory_;   // a page that may not be touched, then the stack
  size_t unused_;  // at the top of the stack, so that not all stacks meet in the same cache lines
  void (*entry_)() = nullptr;
  bool abandoned_ = false;  // whether frames may be left on the stack
  void* fake_stack_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace cuda_emulation
