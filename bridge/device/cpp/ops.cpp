// The ops that need a kernel of their own: creation, copies between devices, and ops that torch has for
// accelerators only.
#include "device.h"
#include "fallback.h"
#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

namespace tpu {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

const c10::DispatchKeySet kTpuKeys(c10::DispatchKey::PrivateUse1);

// Makes a device current for one allocation.
class On {
 public:
  explicit On(c10::DeviceIndex device) : before_(exchange_device(device)) {}
  ~On() {
    exchange_device(before_);
  }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  c10::DeviceIndex before_;
};

Tensor alias_of(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kTpu ? cpu_alias(tensor) : tensor;
}

// The tpu device of an op that got here, so that has an operand there.
c10::Device tpu_of(const Tensor& one, const Tensor& other) {
  return one.device().type() == kTpu ? one.device() : other.device();
}

// The alias of an operand, which must be on this device. An undefined tensor stays one.
Tensor operand(const Tensor& tensor, c10::Device device, const char* name, const char* op) {
  if (!tensor.defined()) {
    return tensor;
  }
  TORCH_CHECK(
      tensor.device() == device,
      "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
      tensor.device(), "! (when checking argument '", name, "' of ", op, "; move it with .to('tpu'))");
  return cpu_alias(tensor);
}

// -- creation --------------------------------------------------------------------------------------------

c10::DeviceIndex creation_device(
    const char* op, std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pinned) {
  if (layout && *layout != c10::kStrided) {
    refuse_layout(op, layout_name(*layout));
  }
  TORCH_CHECK(!pinned.value_or(false), op, ": only dense CPU tensors can be pinned, not those of the tpu device");
  return checked_index(device ? device->index() : -1);
}

Tensor empty(
    SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  On on(creation_device("aten::empty", layout, device, pinned));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), kTpuKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    SymIntArrayRef size,
    SymIntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  On on(creation_device("aten::empty_strided", layout, device, pinned));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      allocator(),
      kTpuKeys,
      c10::dtype_or_default(dtype));
}

// Zeros with memory: torch's zero tensors without memory would have to be told apart everywhere.
Tensor efficient_zero_tensor(
    SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  const auto index = creation_device("aten::_efficientzerotensor", layout, device, pinned);
  BelowAutograd below;
  return from_cpu(
      at::zeros(C10_AS_INTARRAYREF_SLOW(size), at::TensorOptions(c10::dtype_or_default(dtype))), index);
}

// -- copies ----------------------------------------------------------------------------------------------

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  BelowAutograd below;
  if (source.device().type() == kTpu && target.device().type() == kTpu && source.is_alias_of(target)) {
    const auto bytes = host_storage(source.storage());  // one, so that torch sees the overlap
    on_storage(bytes, target).copy_(on_storage(bytes, source));
  } else {
    alias_of(target).copy_(alias_of(source));
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

// `.to(...)` of a tpu tensor: one copy.
Tensor to_copy(
    const Tensor& tensor,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    bool non_blocking,
    std::optional<c10::MemoryFormat> format) {
  if (layout && *layout != c10::kStrided) {
    refuse_layout("aten::_to_copy", layout_name(*layout));
  }
  BelowAutograd below;
  const auto target = device.value_or(tensor.device());
  if (target.type() != kTpu) {
    return at::_to_copy(cpu_alias(tensor), dtype, layout, target, pinned, non_blocking, format);
  }
  const auto index = checked_index(target.index());
  return from_cpu(
      at::_to_copy(cpu_alias(tensor), dtype, layout, c10::Device(c10::kCPU), std::nullopt, non_blocking, format),
      index);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  BelowAutograd below;
  return at::_local_scalar_dense(cpu_alias(tensor));
}

// An op has finished with a tensor's memory when it returns, whatever the stream.
void record_stream(Tensor&, c10::Stream) {}

// -- convolutions: torch asks accelerators for these two -----------------------------------------------------

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const MaybeTensor& bias,
    SymIntArrayRef stride,
    SymIntArrayRef padding,
    SymIntArrayRef dilation,
    bool transposed,
    SymIntArrayRef output_padding,
    SymInt groups) {
  BelowAutograd below;
  const auto op = "aten::convolution";
  const auto device = tpu_of(input, weight);
  const auto host_bias = bias && bias->defined() ? MaybeTensor(operand(*bias, device, "bias", op)) : std::nullopt;
  return from_cpu(
      at::convolution_symint(
          operand(input, device, "input", op),
          operand(weight, device, "weight", op),
          host_bias,
          stride,
          padding,
          dilation,
          transposed,
          output_padding,
          std::move(groups)),
      device.index());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& weight,
    SymIntArrayRef stride,
    SymIntArrayRef padding,
    SymIntArrayRef dilation,
    bool transposed,
    SymIntArrayRef output_padding,
    SymInt groups,
    std::array<bool, 3> wanted) {
  BelowAutograd below;
  const std::vector<SymInt> bias_size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const auto op = "aten::convolution_backward";
  const auto device = tpu_of(input, weight);
  const auto index = device.index();
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      operand(grad, device, "grad_output", op),
      operand(input, device, "input", op),
      operand(weight, device, "weight", op),
      SymIntArrayRef(bias_size),
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      wanted);
  const auto here = [index](const Tensor& tensor) { return tensor.defined() ? from_cpu(tensor, index) : tensor; };
  return {here(of_input), here(of_weight), here(of_bias)};
}

}  // namespace

void register_ops(const std::vector<std::string>& direct, const std::vector<std::string>& metadata) {
  // A registration lasts as long as its Library.
  static torch::Library everything(
      torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  everything.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto& name : direct) {
    aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  for (const auto& name : metadata) {
    aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_metadata>());
  }
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_efficientzerotensor", &efficient_zero_tensor);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("_to_copy", &to_copy);
  aten.impl("_local_scalar_dense", &local_scalar_dense);
  aten.impl("record_stream", &record_stream);
  aten.impl("convolution_overrideable", &convolution);
  aten.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace tpu
