// Storage of the simulated tpu device: host memory under another device name, counted per device.
//
// A tpu tensor and its CPU alias are two tensors over the same bytes, each of which keeps the bytes alive.
#pragma once

#include <ATen/core/TensorBase.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <string>

namespace tpu {

inline constexpr auto kTpu = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kMaxDevices = 64;

// What a device holds now and held before, in bytes and in storages.
struct MemoryStats {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t allocated_total = 0;
  int64_t freed_total = 0;
  int64_t storages = 0;
  int64_t storages_peak = 0;
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t out_of_memory = 0;
  int64_t limit = -1;  // bytes; -1: none
};

MemoryStats memory_stats(c10::DeviceIndex device);
void reset_peak_memory_stats(c10::DeviceIndex device);
void reset_accumulated_memory_stats(c10::DeviceIndex device);
// Let allocations beyond `bytes` fail (-1: none do). `source` tells in the error whose limit it is.
void set_memory_limit(c10::DeviceIndex device, int64_t bytes, std::string source);

// Let a forked child find the counters unlocked, whatever other threads of its parent were doing. Call once.
void survive_forks();

// The allocator behind torch.empty(..., device="tpu") and UntypedStorage(n, device="tpu").
c10::DeviceAllocator* allocator();

// The allocator behind torch.empty(..., pin_memory=True) and Tensor.pin_memory(), and what it holds.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// A CPU storage over the bytes of a tpu storage. It may be resized: then it has bytes of its own.
c10::Storage host_storage(const c10::Storage& storage);

// A tpu storage over the bytes of a CPU storage, counted as the device's.
c10::Storage adopt_storage(const c10::Storage& storage, c10::DeviceIndex device);

// A tensor with the dtype, geometry and lazy bits of another, over this storage.
at::Tensor on_storage(c10::Storage storage, const at::Tensor& like);

// A tpu tensor over the storage of a CPU tensor.
at::Tensor from_cpu(const at::Tensor& tensor, c10::DeviceIndex device);

// Whether a tensor has elements but its storage was resized to nothing: a CPU kernel would crash.
bool freed(const at::Tensor& tensor);

// A CPU tensor over the storage of a tpu tensor.
at::Tensor cpu_alias(const at::Tensor& tensor);

// The bytes of `source` (a CPU storage) become those of `target`, a storage of the device.
void replace_bytes(const c10::Storage& target, const c10::Storage& source);

// Grow or shrink a storage of the device; the bytes both sizes have are kept.
void resize_bytes(const c10::Storage& storage, size_t nbytes);

}  // namespace tpu
