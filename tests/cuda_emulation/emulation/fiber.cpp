#include "emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_emulation {
namespace {

constexpr size_t kGuard = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStack = 256 << 10;  // red zones make frames several times as large
#else
constexpr size_t kStack = 64 << 10;
#endif

Fiber* running = nullptr;
void* host_fake_stack = nullptr;
const void* host_stack = nullptr;
size_t host_stack_size = 0;

// AddressSanitizer must know which stack is in use.
void leave_for(void** fake_stack, const void* stack, size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, stack, size);
#else
  (void)fake_stack, (void)stack, (void)size;
#endif
}
void arrive_from(void* fake_stack, const void** stack, size_t* size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, stack, size);
#else
  (void)fake_stack, (void)stack, (void)size;
#endif
}

}  // namespace

#if defined(__x86_64__)

// Saves what the System V calling convention lets a function keep, and the stack pointer.
extern "C" void cuda_emulation_switch(void** saved_stack_pointer, void* stack_pointer);
asm(R"(
.text
.globl cuda_emulation_switch
.hidden cuda_emulation_switch
.type cuda_emulation_switch, @function
cuda_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulation_switch, .-cuda_emulation_switch
)");

namespace {
void* host_stack_pointer = nullptr;
}

void Fiber::restart(void (*entry)()) {
  entry_ = entry;
  constexpr int kSaved = 6;
  void** top = reinterpret_cast<void**>(memory_ + kGuard + kStack - 64 - unused_);
  *--top = nullptr;  // where begin() would return to; it keeps the stack aligned as at a call
  *--top = reinterpret_cast<void*>(&Fiber::begin);
  for (int i = 0; i < kSaved; ++i) *--top = nullptr;
  stack_pointer_ = top;
#if defined(__SANITIZE_ADDRESS__)
  if (abandoned_) ASAN_UNPOISON_MEMORY_REGION(memory_ + kGuard, kStack);
#endif
  abandoned_ = true;
}

#else

namespace {
ucontext_t host_context;
}

void Fiber::restart(void (*entry)()) {
  entry_ = entry;
  getcontext(&context_);
  context_.uc_stack.ss_sp = memory_ + kGuard;
  context_.uc_stack.ss_size = kStack - unused_;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::begin, 0);
#if defined(__SANITIZE_ADDRESS__)
  if (abandoned_) ASAN_UNPOISON_MEMORY_REGION(memory_ + kGuard, kStack);
#endif
  abandoned_ = true;
}

#endif

Fiber::Fiber() {
  void* memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  mprotect(memory_, kGuard, PROT_NONE);
  static size_t count = 0;
  unused_ = count++ % 61 * 192;
}

Fiber::~Fiber() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory_ + kGuard, kStack);
#endif
  munmap(memory_, kGuard + kStack);
}

void Fiber::begin() {
  arrive_from(nullptr, &host_stack, &host_stack_size);
  Fiber* self = running;
  self->entry_();
  self->abandoned_ = false;
  self->switch_to_host(true);
  std::abort();  // a fiber whose entry has returned is never resumed
}

void Fiber::resume() {
  running = this;
  leave_for(&host_fake_stack, memory_ + kGuard, kStack);
#if defined(__x86_64__)
  cuda_emulation_switch(&host_stack_pointer, stack_pointer_);
#else
  swapcontext(&host_context, &context_);
#endif
  arrive_from(host_fake_stack, nullptr, nullptr);
  running = nullptr;
}

void Fiber::switch_to_host(bool forever) {
  leave_for(forever ? nullptr : &fake_stack_, host_stack, host_stack_size);
#if defined(__x86_64__)
  cuda_emulation_switch(&stack_pointer_, host_stack_pointer);
#else
  swapcontext(&context_, &host_context);
#endif
  arrive_from(fake_stack_, &host_stack, &host_stack_size);
}

void Fiber::suspend() { running->switch_to_host(false); }

}  // namespace cuda_emulation
