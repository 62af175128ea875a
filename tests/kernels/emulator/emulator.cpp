// Blocks one after the other, in each block the threads as fibers, in an order that can be chosen.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include <ucontext.h>

#include "cuda_runtime.h"

namespace emulator {
namespace {

constexpr size_t kStackBytes = 96 << 10;  // a kernel's arguments may take a third

[[noreturn]] void fail(const char* what, Place place = {"", 0}) {
  std::fprintf(stderr, "emulated CUDA: %s %s", what, place.name);
  std::fprintf(stderr, place.line ? " in line %d\n" : "\n", place.line);
  std::abort();
}

bool same(Place a, Place b) { return a.line == b.line && strcmp(a.name, b.name) == 0; }

// ---- fibers -------------------------------------------------------------------------------------------------

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool begun = false, done = true, waiting = false;
};

// What the lanes of a warp bring; results of one meeting live until the one after the next.
struct Meeting {
  uint64_t brought[kLanesOfWarp], results[2][kLanesOfWarp];
  Place place{"", 0};
  unsigned arrived = 0, number = 0;
};

struct Machine {
  std::vector<Fiber*> fibers;
  std::vector<Meeting> warps;
  std::vector<unsigned> order;
  jmp_buf scheduler;
  Body body = nullptr;
  void* argument = nullptr;
  unsigned threads = 0, live = 0, current = 0;
  unsigned at_barrier = 0;
  Place barrier{"", 0};
  std::minstd_rand random;
  int shuffled = 0;
  long launches = 0, memsets = 0;
} machine;

void leave() {
  if (_setjmp(machine.fibers[machine.current]->at) == 0) _longjmp(machine.scheduler, 1);
}

// A fiber serves one thread after the other and never ends.
void fiber_main() {
  for (;;) {
    machine.body(machine.argument);
    machine.fibers[machine.current]->done = true;
    --machine.live;
    leave();
  }
}

void resume(unsigned thread) {
  Fiber& fiber = *machine.fibers[thread];
  machine.current = thread;
  threadIdx = dim3(thread);
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

Fiber* new_fiber() {
  auto* fiber = new Fiber;
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp = fiber->stack.data();
  fiber->start.uc_stack.ss_size = fiber->stack.size();
  fiber->start.uc_link = nullptr;
  makecontext(&fiber->start, fiber_main, 0);
  return fiber;
}

// ---- blocks -------------------------------------------------------------------------------------------------

void choose_order() {
  if (machine.shuffled == 1)
    for (unsigned i = 0; i < machine.threads; ++i) machine.order[i] = machine.threads - 1 - i;
  if (machine.shuffled > 1)
    for (unsigned i = machine.threads; i > 1; --i) std::swap(machine.order[i - 1], machine.order[machine.random() % i]);
}

void run_block() {
  choose_order();
  machine.live = machine.threads;
  machine.at_barrier = 0;
  for (Meeting& warp : machine.warps) warp.arrived = 0;
  for (unsigned i = 0; i < machine.threads; ++i) machine.fibers[i]->done = machine.fibers[i]->waiting = false;
  while (machine.live > 0) {
    bool moved = false;
    for (unsigned thread : machine.order) {
      const Fiber& fiber = *machine.fibers[thread];
      if (fiber.done || fiber.waiting) continue;
      moved = true;
      resume(thread);
    }
    if (!moved) fail("threads wait for others that never come, at", machine.warps[0].place);
  }
}

void wait() {
  machine.fibers[machine.current]->waiting = true;
  leave();
}

void wake(unsigned first, unsigned last) {
  for (unsigned i = first; i < last; ++i) machine.fibers[i]->waiting = false;
}

}  // namespace

void run_grid(dim3 grid, dim3 block, Body body, void* argument) {
  if (grid.x == 0 || block.x == 0 || block.x > 1024) fail("a grid of no blocks, or blocks of no or too many threads");
  while (machine.fibers.size() < block.x) machine.fibers.push_back(new_fiber());
  ++machine.launches;
  machine.body = body;
  machine.argument = argument;
  machine.threads = block.x;
  machine.warps.assign((block.x + kLanesOfWarp - 1) / kLanesOfWarp, Meeting());
  machine.order.resize(block.x);
  std::iota(machine.order.begin(), machine.order.end(), 0u);
  gridDim = grid;
  blockDim = block;
  for (unsigned i = 0; i < grid.x; ++i) {
    blockIdx = dim3(machine.shuffled ? grid.x - 1 - i : i);
    run_block();
  }
}

const uint64_t* meet_warp(Place place, uint64_t value) {
  const unsigned first = machine.current - machine.current % kLanesOfWarp;
  if (first + kLanesOfWarp > machine.threads) fail("less than a warp meets at", place);
  Meeting& warp = machine.warps[first / kLanesOfWarp];
  if (warp.arrived != 0 && !same(warp.place, place)) fail("lanes of a warp meet at different places, one is", place);
  warp.place = place;
  warp.brought[machine.current - first] = value;
  const unsigned parity = warp.number % 2;
  if (++warp.arrived < kLanesOfWarp) {
    wait();
    return warp.results[parity];
  }
  memcpy(warp.results[parity], warp.brought, sizeof warp.brought);
  warp.arrived = 0;
  ++warp.number;
  wake(first, first + kLanesOfWarp);
  return warp.results[parity];
}

void meet_block(Place place) {
  if (machine.at_barrier != 0 && !same(machine.barrier, place))
    fail("threads of a block meet at different places, one is", place);
  machine.barrier = place;
  if (++machine.at_barrier < machine.live) return wait();
  machine.at_barrier = 0;
  wake(0, machine.threads);
}

}  // namespace emulator

// ---- memory -------------------------------------------------------------------------------------------------

namespace {
constexpr size_t kGuard = 256;
constexpr unsigned char kPoison = 0xa5;
}  // namespace

cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t, cudaStream_t) {
  auto* begin = static_cast<unsigned char*>(std::malloc(bytes + 2 * kGuard));
  memset(begin, kPoison, bytes + 2 * kGuard);
  memcpy(begin, &bytes, sizeof bytes);
  *memory = begin + kGuard;
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  auto* begin = static_cast<unsigned char*>(memory) - kGuard;
  size_t bytes;
  memcpy(&bytes, begin, sizeof bytes);
  for (size_t i = 0; i < kGuard; ++i) {
    const bool before = i < sizeof bytes || begin[i] == kPoison;
    if (!before || begin[kGuard + bytes + i] != kPoison) emulator::fail("a kernel wrote outside of its memory");
  }
  std::free(begin);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  ++emulator::machine.memsets;
  return memset(memory, value, bytes), cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* into, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return memmove(into, from, bytes), cudaSuccess;
}

// How many kernels were started, and how many memsets.
extern "C" __attribute__((visibility("default"))) long emulator_launches() { return emulator::machine.launches; }
extern "C" __attribute__((visibility("default"))) long emulator_memsets() { return emulator::machine.memsets; }

// 0: threads and blocks in order; 1: backwards; more: blocks backwards, threads in a random order.
extern "C" __attribute__((visibility("default"))) void emulator_order(int order) {
  emulator::machine.shuffled = order;
  emulator::machine.random.seed(unsigned(order));
}
