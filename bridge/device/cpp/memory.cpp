#include "memory.h"

#include "device.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace tpu {
namespace {

// -- counting --------------------------------------------------------------------------------------------

struct Counter {
  std::mutex mutex;
  MemoryStats stats;
  std::string limit_source;  // for the message
};

std::array<Counter, kMaxDevices>& counters() {
  static auto* all = new std::array<Counter, kMaxDevices>();  // never destroyed: storages may outlive main
  return *all;
}

void count_in(c10::DeviceIndex device, size_t nbytes) {
  auto& counter = counters()[device];
  std::lock_guard<std::mutex> lock(counter.mutex);
  auto& stats = counter.stats;
  const auto size = static_cast<int64_t>(nbytes);
  if (stats.limit >= 0 && size > 0 && stats.allocated + size > stats.limit) {
    ++stats.out_of_memory;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "tpu:", int(device), " is out of memory: ", size, " bytes asked for, ", stats.allocated, " of ",
        stats.limit, " bytes held by ", stats.storages, " storages. The limit is ", counter.limit_source,
        ". torch.tpu.memory_summary() lists what holds memory; use smaller batches or shards, free tensors, or "
        "raise the limit (torch.tpu.set_memory_limit).");
  }
  stats.allocated += size;
  stats.allocated_total += size;
  stats.peak = std::max(stats.peak, stats.allocated);
  stats.storages_peak = std::max(stats.storages_peak, ++stats.storages);
  ++stats.allocations;
}

void count_out(c10::DeviceIndex device, size_t nbytes) {
  auto& counter = counters()[device];
  std::lock_guard<std::mutex> lock(counter.mutex);
  counter.stats.allocated -= static_cast<int64_t>(nbytes);
  counter.stats.freed_total += static_cast<int64_t>(nbytes);
  --counter.stats.storages;
  ++counter.stats.frees;
}

// -- bytes -----------------------------------------------------------------------------------------------

// What a tpu DataPtr owns: bytes that some CPU storage holds, counted for a device until it dies.
struct Held {
  c10::Storage host;
  c10::DeviceIndex device;
  size_t nbytes;
};

void release_held(void* context) {
  auto* held = static_cast<Held*>(context);
  count_out(held->device, held->nbytes);
  delete held;
}

// The DataPtr of bytes that are counted already.
c10::DataPtr hold_counted(c10::Storage host, c10::DeviceIndex device) {
  const size_t nbytes = host.nbytes();
  void* data = nbytes ? host.mutable_data() : nullptr;
  auto* held = new Held{std::move(host), device, nbytes};
  return {data, held, &release_held, c10::Device(kTpu, device)};
}

c10::DataPtr hold(c10::Storage host, c10::DeviceIndex device) {
  count_in(device, host.nbytes());
  return hold_counted(std::move(host), device);
}

c10::Storage new_host_storage(size_t nbytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, c10::GetCPUAllocator(), true);
}

struct TpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device();
    count_in(device, nbytes);  // first: the limit is to be met before the host's own
    try {
      return hold_counted(new_host_storage(nbytes), device);
    } catch (...) {
      count_out(device, nbytes);
      throw;
    }
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto now = memory_stats(checked_index(device));
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto bytes = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& stat = (*array)[bytes];
      stat.current = now.allocated;
      stat.peak = now.peak;
      stat.allocated = now.allocated_total;
      stat.freed = now.freed_total;
    }
    for (auto* array : {&stats.allocation, &stats.active}) {
      auto& stat = (*array)[bytes];
      stat.current = now.storages;
      stat.peak = now.storages_peak;
      stat.allocated = now.allocations;
      stat.freed = now.frees;
    }
    stats.num_ooms = now.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset_accumulated_memory_stats(checked_index(device));
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak_memory_stats(checked_index(device));
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto now = memory_stats(checked_index(device));
    TORCH_CHECK(now.limit >= 0, "tpu:", int(device), " has no memory limit: set one with torch.tpu.set_memory_limit");
    return {static_cast<size_t>(std::max<int64_t>(0, now.limit - now.allocated)), static_cast<size_t>(now.limit)};
  }
};

// Host memory that remembers that it was asked for as pinned. There is no transfer that it would speed up.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }
  static std::unordered_set<const void*>& pinned() {
    static auto* pinned = new std::unordered_set<const void*>();
    return *pinned;
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      pinned().erase(data);
    }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? c10::alloc_cpu(nbytes) : nullptr;
    if (data) {
      std::lock_guard<std::mutex> lock(mutex());
      pinned().insert(data);
    }
    return {data, data, data ? &release : &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

TpuAllocator the_allocator;
PinnedAllocator the_pinned_allocator;

void drop_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

}  // namespace

MemoryStats memory_stats(c10::DeviceIndex device) {
  auto& counter = counters()[device];
  std::lock_guard<std::mutex> lock(counter.mutex);
  return counter.stats;
}

void reset_peak_memory_stats(c10::DeviceIndex device) {
  auto& counter = counters()[device];
  std::lock_guard<std::mutex> lock(counter.mutex);
  counter.stats.peak = counter.stats.allocated;
  counter.stats.storages_peak = counter.stats.storages;
}

void reset_accumulated_memory_stats(c10::DeviceIndex device) {
  auto& counter = counters()[device];
  std::lock_guard<std::mutex> lock(counter.mutex);
  auto& stats = counter.stats;
  stats.allocated_total = stats.freed_total = stats.allocations = stats.frees = stats.out_of_memory = 0;
}

void set_memory_limit(c10::DeviceIndex device, int64_t bytes, std::string source) {
  auto& counter = counters()[device];
  std::lock_guard<std::mutex> lock(counter.mutex);
  counter.stats.limit = bytes;
  counter.limit_source = std::move(source);
}

void survive_forks() {
  counters();
  PinnedAllocator::mutex();
  const auto unlock = [] {
    PinnedAllocator::mutex().unlock();
    for (auto& counter : counters()) {
      counter.mutex.unlock();
    }
  };
  const auto lock = [] {
    for (auto& counter : counters()) {
      counter.mutex.lock();
    }
    PinnedAllocator::mutex().lock();
  };
  pthread_atfork(lock, unlock, unlock);
}

c10::DeviceAllocator* allocator() {
  return &the_allocator;
}

c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(PinnedAllocator::mutex());
  return PinnedAllocator::pinned().count(data) > 0;
}

c10::Storage host_storage(const c10::Storage& storage) {
  const size_t nbytes = storage.nbytes();
  TORCH_CHECK(
      storage.data() || !nbytes,
      "a storage of ", nbytes, " bytes on the simulated tpu device has no memory (a fake tensor?)");
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &drop_storage, c10::Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), c10::GetCPUAllocator(), true);
}

c10::Storage adopt_storage(const c10::Storage& storage, c10::DeviceIndex device) {
  const size_t nbytes = storage.nbytes();
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, hold(storage, device), &the_allocator, true);
}

at::Tensor on_storage(c10::Storage storage, const at::Tensor& like) {
  const auto key = storage.device_type() == kTpu ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  auto result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) {
    impl->_set_conj(true);
  }
  if (like.is_neg()) {
    impl->_set_neg(true);
  }
  return result;
}

at::Tensor from_cpu(const at::Tensor& tensor, c10::DeviceIndex device) {
  if (tensor._is_zerotensor()) {  // zeros without memory: give them some
    return from_cpu(at::zeros(tensor.sizes(), tensor.options()), device);
  }
  return on_storage(adopt_storage(tensor.storage(), device), tensor);
}

bool freed(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().nbytes() == 0 && tensor.numel() && !tensor._is_zerotensor();
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) {
    return at::zeros(tensor.sizes(), tensor.options().device(c10::kCPU));
  }
  TORCH_CHECK(
      !freed(tensor),
      "a tensor of shape ", tensor.sizes(),
      " has no memory: its storage was resized to 0 bytes. Resize it back before using the tensor.");
  return on_storage(host_storage(tensor.storage()), tensor);
}

void replace_bytes(const c10::Storage& target, const c10::Storage& source) {
  auto* impl = target.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(hold(source, target.device().index()));
  impl->set_nbytes(source.nbytes());
}

void resize_bytes(const c10::Storage& storage, size_t nbytes) {
  auto host = new_host_storage(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) {
    std::memcpy(host.mutable_data(), storage.data(), kept);
  }
  replace_bytes(storage, host);
}

}  // namespace tpu
