// Runs any op on tpu tensors with torch's CPU kernel, through aliases of their storage.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace tpu {

// The arguments of an op that may hold CPU tensors of any size, as on cuda (index tensors, lengths).
void set_host_arguments(const std::string& op, std::vector<std::string> arguments);

// Say of an op whether it may read inputs, unchecked, after it has begun to write to other arguments.
void set_reads_again(const std::string& op, bool reads_again);

// The boxed fallback: aliases in, CPU kernel, results taken over.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The CPU kernel on the tpu tensors themselves: for ops that touch no element.
void on_metadata(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Register both, and the kernels in ops.cpp. `direct` are ops that torch would take apart before they reach
// the fallback; `metadata` are ops that touch no element. Call once.
void register_ops(const std::vector<std::string>& direct, const std::vector<std::string>& metadata);

// Kernels below this guard see neither autograd nor autocast, which have had their turn. `counting` lets the ops
// that a kernel is made of go on counting the versions of what they write.
struct BelowAutograd {
  explicit BelowAutograd(bool counting = false)
      : guard(
            (counting ? c10::autograd_dispatch_keyset : c10::autograd_dispatch_keyset_with_ADInplaceOrView) |
            c10::autocast_dispatch_keyset) {}

  c10::impl::ExcludeDispatchKeyGuard guard;
};

// A layout as torch's Python names it: "sparse_coo".
std::string layout_name(c10::Layout layout);

[[noreturn]] void refuse_layout(const std::string& op, const std::string& layout);

}  // namespace tpu
