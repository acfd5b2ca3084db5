// Devices, streams and random generators of the simulated tpu device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace tpu {

c10::DeviceIndex device_count();
void set_device_count(int64_t count);
c10::DeviceIndex current_device();
// Make this device the thread's current one; returns the one before. A negative index changes nothing.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
// The index as it is; raises for a device that does not exist. A negative index stands for the current device.
c10::DeviceIndex checked_index(int64_t index);

// The generator a device draws from, and the CPU generator inside it that CPU kernels can use.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator host_generator(const at::Generator& generator);

// Make torch know the device. Called once, when the module is imported.
void register_device();

}  // namespace tpu
