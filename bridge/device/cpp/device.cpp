#include "device.h"

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>

namespace tpu {
namespace {

std::atomic<int> the_count{1};
thread_local c10::DeviceIndex the_current = 0;
thread_local std::array<c10::StreamId, kMaxDevices> the_streams{};  // 0 is the default stream
std::atomic<c10::StreamId> the_last_stream{0};

// -- random numbers --------------------------------------------------------------------------------------

// A generator of the device: a CPU generator under the device's name. CPU kernels draw from the one inside.
struct TpuGenerator final : c10::GeneratorImpl {
  TpuGenerator(at::Generator host, c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kTpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  // The state says all; pickle asks for the offset of every generator that is not a CPU one, and restores it.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "a generator of the device 'tpu' has no offset, got ", offset, "; use set_state");
  }
  uint64_t get_offset() const override {
    return 0;
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  TpuGenerator* clone_impl() const override {
    return new TpuGenerator(host.clone(), device().index());
  }

  at::Generator host;
};

// -- events ----------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

struct RecordedEvent {
  Clock::time_point time;
  bool timed;
};

// -- what torch asks of a device -------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(checked_index(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(checked_index(device));
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kTpu, the_current);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_bytes(storage, nbytes);
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return the_current;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(checked_index(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(checked_index(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? -1 : exchange_device(checked_index(device));
  }
};

// Ops have finished when they return, so streams and events order nothing: they are the names for it that
// programs use, and events tell the time.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kTpu;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kTpu, exchange_device(checked_index(device.index())));
  }
  c10::Device getDevice() const override {
    return c10::Device(kTpu, the_current);
  }
  void setDevice(c10::Device device) const override {
    exchange_device(checked_index(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      the_current = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};  // every dtype
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = checked_index(device.index());
    return stream(index, the_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(checked_index(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(checked_index(device.index()), ++the_last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto index = checked_index(next.device_index());
    const auto before = stream(index, the_streams[index]);
    the_streams[index] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    checked_index(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "an event of tpu:", int(device), " can't be recorded on a stream of tpu:", int(stream.device_index()));
    if (!*event) {
      *event = new RecordedEvent{};
    }
    *static_cast<RecordedEvent*>(*event) = {Clock::now(), flag == c10::EventFlag::BACKEND_DEFAULT};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "both events must be recorded before the time between them is known");
    const auto* from = static_cast<const RecordedEvent*>(start);
    const auto* to = static_cast<const RecordedEvent*>(end);
    TORCH_CHECK(from->timed && to->timed, "both events must be made with enable_timing=True");
    return std::chrono::duration<double, std::milli>(to->time - from->time).count();
  }

 private:
  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kTpu, device), id);
  }
};

}  // namespace

c10::DeviceIndex device_count() {
  return static_cast<c10::DeviceIndex>(the_count.load());
}

void set_device_count(int64_t count) {
  TORCH_CHECK(
      1 <= count && count <= kMaxDevices,
      "the number of simulated tpu devices must be between 1 and ", int(kMaxDevices), ", got ", count);
  the_count = static_cast<int>(count);
}

c10::DeviceIndex current_device() {
  return the_current;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const auto before = the_current;
  if (device >= 0) {
    the_current = device;
  }
  return before;
}

c10::DeviceIndex checked_index(int64_t index) {
  if (index < 0) {
    return the_current;
  }
  TORCH_CHECK(
      index < the_count.load(),
      "invalid device tpu:", index, ": torch.tpu.device_count() is ", the_count.load(),
      " (the environment variable BRIDGE_DEVICE_COUNT sets it)");
  return static_cast<c10::DeviceIndex>(index);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::array<at::Generator, kMaxDevices>();
    for (int i = 0; i < kMaxDevices; ++i) {
      (*made)[i] = new_generator(static_cast<c10::DeviceIndex>(i));
    }
    return made;
  }();
  return (*all)[device];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<TpuGenerator>(at::detail::createCPUGenerator(), device);
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<TpuGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

void register_device() {
  static const Guard* guard = new Guard();
  static const c10::impl::DeviceGuardImplRegistrar registrar(kTpu, guard);
  c10::SetAllocator(kTpu, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  survive_forks();
}

}  // namespace tpu
