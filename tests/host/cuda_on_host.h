// Runs a CUDA kernel's source on the host, one fiber per thread, one block after another. For tests
// only.
//
// Served: threadIdx/blockIdx/blockDim.x, __shared__, __syncthreads(_or), __shfl_xor_sync,
// __ballot_sync and mma_m16n8k16 by whole warps, __ldg, __ldcs, __ldcg, atomicMax. A
// collective that some thread of its warp or block never reaches is reported, not waited for.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda/ptx/mma.cuh"

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace cuda_on_host {

struct Index {
  unsigned x;
};
inline Index thread_index, block_index, block_size;

// A meeting point of `size` threads; values are exchanged through two buffers in turn.
struct Meeting {
  int size = 0;
  int arrived = 0;
  unsigned generation = 0;
  std::vector<uint32_t> values[2];
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  const Meeting* waits_at = nullptr;
  unsigned waits_for = 0;
};

class Block {
 public:
  static Block* current;

  void run(const std::function<void()>& body, unsigned threads) {
    current = this;
    body_ = &body;
    fibers_.resize(threads);
    warps_.resize(threads / 32);
    for (Meeting& warp : warps_) reset(warp, 32);
    reset(whole_, static_cast<int>(threads));
    block_size.x = threads;
    for (Fiber& fiber : fibers_) {
      fiber.stack.resize(1 << 16);
      fiber.done = false;
      fiber.waits_at = nullptr;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::enter, 0);
    }
    for (bool progress = true; progress;) {
      progress = false;
      for (active_ = 0; active_ < fibers_.size(); ++active_) {
        Fiber& fiber = fibers_[active_];
        if (fiber.done) continue;
        if (fiber.waits_at && fiber.waits_at->generation == fiber.waits_for) continue;
        fiber.waits_at = nullptr;
        thread_index.x = static_cast<unsigned>(active_);
        progress = true;
        swapcontext(&scheduler_, &fiber.context);
      }
    }
    for (const Fiber& fiber : fibers_) {
      if (!fiber.done)
        throw std::runtime_error("cuda_on_host: some threads never reach a collective");
    }
  }

  // Leaves `value`, waits for the others, returns everybody's values.
  const std::vector<uint32_t>& meet_warp(uint32_t value) {
    return meet(warps_[active_ / 32], static_cast<int>(active_ % 32), value);
  }
  const std::vector<uint32_t>& meet_block(uint32_t value) {
    return meet(whole_, static_cast<int>(active_), value);
  }

 private:
  static void enter() {
    (*current->body_)();
    current->fibers_[current->active_].done = true;
  }
  static void reset(Meeting& meeting, int size) {
    meeting.size = size;
    meeting.arrived = 0;
    meeting.generation = 0;
    for (auto& values : meeting.values) values.assign(size, 0);
  }
  const std::vector<uint32_t>& meet(Meeting& meeting, int slot, uint32_t value) {
    std::vector<uint32_t>& values = meeting.values[meeting.generation & 1];
    values[slot] = value;
    if (++meeting.arrived == meeting.size) {
      meeting.arrived = 0;
      ++meeting.generation;
    } else {
      Fiber& fiber = fibers_[active_];
      fiber.waits_at = &meeting;
      fiber.waits_for = meeting.generation;
      swapcontext(&fiber.context, &scheduler_);
    }
    return values;
  }

  const std::function<void()>* body_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Meeting> warps_;
  Meeting whole_;
  ucontext_t scheduler_;
  size_t active_ = 0;
};
inline Block* Block::current = nullptr;

inline void launch(int blocks, int threads, const std::function<void()>& body) {
  Block block;
  for (int i = 0; i < blocks; ++i) {
    block_index.x = static_cast<unsigned>(i);
    block.run(body, static_cast<unsigned>(threads));
  }
}

// Memory that ends at a page which faults on any access, filled with `poison`.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t bytes, int poison = 0xa5) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + 15) / page * page + 2 * page;
    base_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::runtime_error("cuda_on_host: mmap failed");
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - (bytes + 15) / 16 * 16;
    memset(data_, poison, bytes);
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  ~GuardedBuffer() { munmap(base_, mapped_); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_, mapped_;
  char* base_;
  char* data_;
};

}  // namespace cuda_on_host

#define threadIdx cuda_on_host::thread_index
#define blockIdx cuda_on_host::block_index
#define blockDim cuda_on_host::block_size

inline void __syncthreads() { cuda_on_host::Block::current->meet_block(0); }

inline int __syncthreads_or(int predicate) {
  int any = 0;
  for (uint32_t value : cuda_on_host::Block::current->meet_block(predicate != 0))
    any |= static_cast<int>(value);
  return any;
}

inline float __shfl_xor_sync(unsigned, float value, int mask) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const unsigned lane = threadIdx.x % 32;
  bits = cuda_on_host::Block::current->meet_warp(bits)[lane ^ static_cast<unsigned>(mask)];
  memcpy(&value, &bits, sizeof(bits));
  return value;
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned votes = 0, lane = 0;
  for (uint32_t value : cuda_on_host::Block::current->meet_warp(predicate))
    votes |= value << lane++;
  return votes;
}

// The sum over k as a tree, neighbours first, in float32: what a butterfly computes.
template <bool kIsBf16>
void jax_fa3::ptx::mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto meet = [](uint32_t word) { return cuda_on_host::Block::current->meet_warp(word); };
  const std::vector<uint32_t> words[6] = {meet(a[0]), meet(a[1]), meet(a[2]),
                                          meet(a[3]), meet(b0),   meet(b1)};
  const auto value = [](uint32_t word, int half) {
    const uint32_t bits = word >> 16 * half & 0xffffu;
    if (!kIsBf16) return __half2float(__half(__half_raw{static_cast<unsigned short>(bits)}));
    const uint32_t wide = bits << 16;
    float number;
    memcpy(&number, &wide, sizeof(number));
    return number;
  };
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float products[16];
    for (int k = 0; k < 16; ++k) {
      const std::vector<uint32_t>& of_a = words[k / 8 * 2 + row / 8];
      const std::vector<uint32_t>& of_b = words[4 + k / 8];
      products[k] =
          value(of_a[row % 8 * 4 + k % 8 / 2], k % 2) * value(of_b[column * 4 + k % 8 / 2], k % 2);
    }
    for (int width = 8; width > 0; width /= 2) {
      for (int k = 0; k < width; ++k) products[k] = products[2 * k] + products[2 * k + 1];
    }
    d[i] += products[0];
  }
}

// Vector loads also check the alignment that the device insists on.
template <typename T>
T __ldg(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) {
    throw std::runtime_error("cuda_on_host: misaligned vector load");
  }
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return __ldg(address);
}

// One block and one thread at a time.
inline int atomicMax(int* address, int value) {
  const int before = *address;
  *address = before > value ? before : value;
  return before;
}
template <typename T>
T __ldcs(const T* address) {
  return __ldg(address);
}
