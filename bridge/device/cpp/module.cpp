// The Python face of the C++ part: see extension.py.
#include "device.h"
#include "fallback.h"
#include "memory.h"

#include <torch/csrc/utils/pybind.h>

namespace {

at::Tensor checked_cpu(const at::Tensor& tensor, c10::DeviceType type) {
  TORCH_CHECK_TYPE(
      tensor.device().type() == type && tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
          tensor.has_storage() && tensor.storage().device_type() == type,
      "expected a strided tensor with memory on '", c10::DeviceTypeName(type, true), "', got a ",
      tensor.layout(), tensor.is_quantized() ? " (quantized)" : "", " tensor on '", tensor.device(), "'");
  return tensor;
}

pybind11::dict stats_of(int64_t device) {
  const auto stats = tpu::memory_stats(tpu::checked_index(device));
  pybind11::dict result;
  result["allocated"] = stats.allocated;
  result["peak"] = stats.peak;
  result["allocated_total"] = stats.allocated_total;
  result["freed_total"] = stats.freed_total;
  result["storages"] = stats.storages;
  result["allocations"] = stats.allocations;
  result["frees"] = stats.frees;
  result["out_of_memory"] = stats.out_of_memory;
  result["limit"] = stats.limit;
  return result;
}

}  // namespace

PYBIND11_MODULE(simulated_tpu, m) {
  using namespace tpu;
  m.def("register_device", &register_device);
  m.def("register_ops", &register_ops);
  m.def("set_host_arguments", &set_host_arguments);
  m.def("set_reads_again", &set_reads_again);

  m.def("cpu_alias", [](const at::Tensor& t) { return cpu_alias(checked_cpu(t, kTpu)); });
  m.def("from_cpu", [](const at::Tensor& t, int64_t device) {
    return from_cpu(checked_cpu(t, c10::kCPU), checked_index(device));
  });

  m.def("device_count", [] { return int(device_count()); });
  m.def("set_device_count", &set_device_count);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int64_t device) { exchange_device(checked_index(device)); });
  m.def("exchange_device", [](int64_t device) {
    return int(exchange_device(device < 0 ? c10::DeviceIndex(-1) : checked_index(device)));
  });
  m.def("default_generator", [](int64_t device) { return default_generator(checked_index(device)); });

  m.def("memory_stats", &stats_of);
  m.def("reset_peak_memory_stats", [](int64_t device) { reset_peak_memory_stats(checked_index(device)); });
  m.def("reset_accumulated_memory_stats", [](int64_t device) {
    reset_accumulated_memory_stats(checked_index(device));
  });
  m.def("set_memory_limit", [](int64_t device, int64_t bytes, std::string source) {
    set_memory_limit(checked_index(device), bytes, std::move(source));
  });
}
