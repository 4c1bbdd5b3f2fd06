#include "emulation/scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulation/fiber.h"

dim3 gridDim, blockDim;
uint3 blockIdx, threadIdx;

namespace cuda_emulation {
namespace {

enum class State { ready, waits, left };

struct Copy {
  void* to;
  std::vector<unsigned char> bytes;
};

struct Thread {
  Fiber fiber;
  unsigned rank = 0;
  uint3 index{};
  State state = State::ready;
  const void* waits_for = nullptr;
  const char* operation = "";
  Where where{"", 0};
  BarrierResult barrier_result{};
  Payload given{}, taken{};
  std::vector<Copy> copies;
  std::vector<std::vector<Copy>> groups;
};

// A meeting of lanes that is under way: mask is 0 when there is none.
struct Meeting {
  uint32_t mask = 0;
  uint32_t arrived = 0;
  const char* operation = "";
  Where where{"", 0};
};

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;
  BarrierResult result{0, 1, 0};
  Where where{"", 0};
};

struct Shared {
  const void* site;
  void* memory;
  size_t size;
};

constexpr unsigned kBarriers = 16;

// The block that runs.
struct Block {
  std::vector<std::unique_ptr<Thread>> threads;
  unsigned size = 0;
  unsigned alive = 0;
  Thread* current = nullptr;
  Barrier barriers[kBarriers];
  std::vector<Meeting> meetings;  // kWarp places for each warp
  std::vector<Shared> shared;
  size_t static_shared = 0;
  unsigned char* dynamic_shared = nullptr;
  std::string fault;
  const std::function<void()>* kernel = nullptr;
};

Block block;
unsigned schedule = 0;
std::mt19937 random_source;
std::mutex one_launch_at_a_time;

void wait_for(const void* what, const char* operation, Where where) {
  Thread& self = *block.current;
  self.state = State::waits;
  self.waits_for = what;
  self.operation = operation;
  self.where = where;
  Fiber::suspend();
}

// ---- memory

// Of exactly `size` bytes, so that AddressSanitizer sees every step beyond; all bits set, so that
// what nobody wrote reads as NaN or -1.
void* poisoned(size_t size, size_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<size_t>(size, 1)) != 0)
    throw std::bad_alloc();
  std::memset(memory, 0xff, size);
  return memory;
}

void free_shared() {
  for (const Shared& shared : block.shared) std::free(shared.memory);
  block.shared.clear();
  std::free(block.dynamic_shared);
  block.dynamic_shared = nullptr;
}

// ---- barriers

// Barrier 0 also opens when a thread that it would have waited for leaves the kernel.
void open_if_complete(Barrier& barrier) {
  const unsigned expected = &barrier == block.barriers ? block.alive : barrier.expected;
  if (barrier.arrived == 0 || barrier.arrived < expected) return;
  for (unsigned i = 0; i < block.size; ++i) {
    Thread& thread = *block.threads[i];
    if (thread.waits_for != &barrier) continue;
    thread.barrier_result = barrier.result;
    if (thread.state == State::waits) thread.state = State::ready;
    thread.waits_for = nullptr;
  }
  barrier = Barrier();
}

// ---- a block's life

void leave(Thread& thread) {
  thread.state = State::left;
  --block.alive;
  if (!thread.copies.empty() && block.fault.empty())
    block.fault = "a thread left with copies that it neither committed nor waited for";
  open_if_complete(block.barriers[0]);
}

void run_thread() {
  Thread& self = *block.current;
  try {
    (*block.kernel)();
  } catch (const std::exception& error) {
    if (block.fault.empty())
      block.fault = "thread " + std::to_string(self.rank) + ": " + error.what();
  }
  leave(self);
}

void prepare_threads() {
  block.size = blockDim.x * blockDim.y * blockDim.z;
  block.alive = block.size;
  while (block.threads.size() < block.size) block.threads.push_back(std::make_unique<Thread>());
  for (unsigned i = 0; i < block.size; ++i) {
    Thread& thread = *block.threads[i];
    thread.rank = i;
    thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    thread.state = State::ready;
    thread.waits_for = nullptr;
    thread.copies.clear();
    thread.groups.clear();
    thread.fiber.restart(run_thread);
  }
  for (Barrier& barrier : block.barriers) barrier = Barrier();
  block.meetings.assign((block.size + kWarp - 1) / kWarp * kWarp, Meeting());
  block.fault.clear();
  block.static_shared = 0;
}

std::string deadlock() {
  std::map<std::string, unsigned> waiting;
  for (unsigned i = 0; i < block.size; ++i) {
    const Thread& thread = *block.threads[i];
    if (thread.state != State::waits) continue;
    ++waiting[std::string(thread.operation) + " (" + thread.where.text() + ")"];
  }
  std::string text = "deadlock:";
  for (const auto& [place, count] : waiting)
    text += " " + std::to_string(count) + " threads wait at " + place + ",";
  return text + " " + std::to_string(block.size - block.alive) + " have left";
}

// 0, 1, ... count - 1 as the schedule has it.
std::vector<unsigned> turns(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (schedule == 1) std::reverse(order.begin(), order.end());
  if (schedule > 1) std::shuffle(order.begin(), order.end(), random_source);
  return order;
}

void run_block() {
  prepare_threads();
  std::vector<unsigned> order = turns(block.size);
  while (block.alive > 0 && block.fault.empty()) {
    bool progress = false;
    if (schedule > 1) std::shuffle(order.begin(), order.end(), random_source);
    for (const unsigned rank : order) {
      Thread& thread = *block.threads[rank];
      if (thread.state != State::ready) continue;
      progress = true;
      block.current = &thread;
      threadIdx = thread.index;
      thread.fiber.resume();
      if (!block.fault.empty()) return;
    }
    if (!progress) block.fault = deadlock();
  }
}

// The meeting of these lanes that is under way, or a free place.
Meeting& meeting_of(unsigned warp, uint32_t mask) {
  Meeting* free = nullptr;
  for (unsigned i = 0; i < kWarp; ++i) {
    Meeting& meeting = block.meetings[warp + i];
    if (meeting.arrived == 0)
      free = free == nullptr ? &meeting : free;
    else if (meeting.mask == mask)
      return meeting;
  }
  return *free;
}

std::string place_of_block() {
  return "CUDA emulation: block (" + std::to_string(blockIdx.x) + ", " +
         std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + "): ";
}

}  // namespace

void* shared_memory(const void* site, size_t size, size_t alignment) {
  for (const Shared& shared : block.shared)
    if (shared.site == site) return shared.memory;
  block.static_shared += size;
  if (block.static_shared > kStaticSharedLimit)
    throw Fault("more than 48 KB of static shared memory");
  block.shared.push_back({site, poisoned(size, alignment), size});
  return block.shared.back().memory;
}

unsigned char* dynamic_shared_memory() { return block.dynamic_shared; }

BarrierResult wait_at_barrier(unsigned number, unsigned threads, int predicate, bool blocks,
                              Where where) {
  if (number >= kBarriers) throw Fault("barrier number above 15 at " + where.text());
  Barrier& barrier = block.barriers[number];
  if (barrier.arrived == 0) {
    barrier.where = where;
    barrier.expected = threads;
  } else if (number == 0 && barrier.where != where) {
    throw Fault("threads of a block meet in different barriers: " + barrier.where.text() + " and " +
                where.text());
  } else if (barrier.expected != threads) {
    throw Fault("a named barrier is asked for different numbers of threads at " + where.text());
  }
  ++barrier.arrived;
  barrier.result.any |= predicate != 0;
  barrier.result.all &= predicate != 0;
  barrier.result.count += predicate != 0;
  Thread& self = *block.current;
  if (blocks) self.waits_for = &barrier;
  open_if_complete(barrier);
  if (blocks && self.waits_for == &barrier) wait_for(&barrier, "barrier", where);
  return self.barrier_result;
}

Payload meet(uint32_t mask, const char* operation, const Payload& given,
             void (*compute)(const Lanes&), Where where) {
  Thread& self = *block.current;
  const unsigned lane = self.rank % kWarp, warp = self.rank - lane;
  if ((mask >> lane & 1) == 0)
    throw Fault(std::string(operation) + ": the calling lane is not in the mask at " +
                where.text());
  Meeting& meeting = meeting_of(warp, mask);
  if (meeting.arrived == 0) {
    meeting = {mask, 0, operation, where};
  } else if (std::strcmp(meeting.operation, operation) != 0) {
    throw Fault(std::string("lanes of a warp meet in different operations: ") + meeting.operation +
                " at " + meeting.where.text() + " and " + operation + " at " + where.text());
  }
  self.given = given;
  meeting.arrived |= 1u << lane;
  if (meeting.arrived != mask) {
    wait_for(&meeting, operation, where);
    return self.taken;
  }
  Lanes lanes{mask, {}, {}};
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) == 0) continue;
    lanes.given[i] = &block.threads[warp + i]->given;
    lanes.taken[i] = &block.threads[warp + i]->taken;
  }
  compute(lanes);
  meeting.arrived = 0;
  for (unsigned i = 0; i < kWarp; ++i)
    if (mask >> i & 1 && i != lane) block.threads[warp + i]->state = State::ready;
  return self.taken;
}

void maybe_yield() {
  if (schedule > 1 && random_source() % 4 == 0) Fiber::suspend();
}

void let_others_go() { Fiber::suspend(); }

void begin_copy(void* to, const void* from, size_t bytes, size_t bytes_read) {
  std::vector<unsigned char> data(bytes, 0);
  std::memcpy(data.data(), from, bytes_read);
  std::memset(to, 0xff, bytes);
  block.current->copies.push_back({to, std::move(data)});
}

void commit_copies() {
  Thread& self = *block.current;
  self.groups.push_back(std::move(self.copies));
  self.copies.clear();
}

void wait_for_copies(size_t groups_left) {
  auto& groups = block.current->groups;
  while (groups.size() > groups_left) {
    for (const Copy& copy : groups.front())
      std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    groups.erase(groups.begin());
  }
}

void set_schedule(unsigned number) { schedule = number; }

void run_kernel(dim3 grid, dim3 threads, size_t dynamic_shared,
                const std::function<void()>& kernel) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  gridDim = grid;
  blockDim = threads;
  block.kernel = &kernel;
  random_source.seed(schedule);
  for (const unsigned i : turns(grid.x * grid.y * grid.z)) {
    blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    block.dynamic_shared = static_cast<unsigned char*>(poisoned(dynamic_shared, 128));
    run_block();
    free_shared();
    if (!block.fault.empty()) throw Fault(place_of_block() + block.fault);
  }
}

}  // namespace cuda_emulation
