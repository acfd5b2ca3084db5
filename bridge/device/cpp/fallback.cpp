#include "fallback.h"

#include "device.h"
#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace tpu {
namespace {

const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

std::unordered_map<std::string, std::vector<std::string>>& host_arguments() {
  static auto* all = new std::unordered_map<std::string, std::vector<std::string>>();
  return *all;
}

// -- what an op's schema says, worked out once -----------------------------------------------------------

struct Plan {
  bool view = false;          // returns views: the CPU kernel makes real ones of the tpu tensors
  bool writes = false;        // some argument is written
  bool draws_unasked = false; // random, without a generator argument
  bool resizes = false;       // changes sizes in place: needs no elements
  bool reads_again = false;   // may read inputs after it has begun to write
  std::vector<char> written;  // by argument
  std::vector<char> host;     // by argument: CPU tensors of any size are welcome
  std::vector<size_t> generators;
};

// By op, whether it may read inputs, unchecked, after it has begun to write; where its schema does not tell.
std::unordered_map<std::string, bool>& reading_again() {
  static auto* all = new std::unordered_map<std::string, bool>();
  return *all;
}

Plan make_plan(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Plan plan;
  plan.view = !schema.returns().empty();
  for (const auto& result : schema.returns()) {
    plan.view = plan.view && result.alias_info() && !result.alias_info()->isWrite();
  }
  const auto host = host_arguments().find(schema.name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    plan.writes = plan.writes || written;
    plan.written.push_back(written);
    bool welcome = false;
    if (host != host_arguments().end()) {
      for (const auto& name : host->second) {
        welcome = welcome || name == argument.name();
      }
    }
    plan.host.push_back(welcome);
    auto type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (type->kind() == c10::TypeKind::GeneratorType) {
      plan.generators.push_back(i);
    }
  }
  const auto known = reading_again().find(schema.name());
  if (known != reading_again().end()) {
    plan.reads_again = known->second;
  } else if (!op.hasTag(at::Tag::pointwise)) {
    for (size_t i = 0; i < plan.written.size(); ++i) {
      plan.reads_again = plan.reads_again || (plan.written[i] && schema.arguments()[i].kwarg_only());
    }
  }
  plan.resizes = op.hasTag(at::Tag::inplace_view);
  plan.draws_unasked = plan.generators.empty() && op.hasTag(at::Tag::nondeterministic_seeded);
  return plan;
}

const Plan& plan_of(const c10::OperatorHandle& op) {
  // Per thread, so that finding a plan takes no lock. Plans are small, and an op has one for good.
  thread_local std::unordered_map<c10::OperatorHandle, std::unique_ptr<Plan>> plans;
  auto& plan = plans[op];
  if (!plan) {
    plan = std::make_unique<Plan>(make_plan(op));
  }
  return *plan;
}

// -- the tensors of one call -----------------------------------------------------------------------------

class Aliases {
 public:
  Aliases(const c10::OperatorHandle& op, bool counting) : op_(op), counting_(counting) {}

  // The alias to hand to the CPU kernel; a CPU tensor comes back as it is where the rules allow it.
  at::Tensor of(const at::Tensor& tensor, size_t argument, const Plan& plan) {
    if (!tensor.defined()) {
      return tensor;
    }
    const auto device = tensor.device();
    if (device.type() != kTpu) {
      if (!device.is_cpu() || plan.written[argument] || (tensor.dim() && !plan.host[argument])) {
        mixed_devices(device, argument);
      }
      return tensor;
    }
    if (index_ < 0) {
      index_ = device.index();
    } else if (device.index() != index_) {
      mixed_devices(device, argument);
    }
    if (tensors_.size() < kSearched) {
      for (auto& known : tensors_) {
        if (known.tensor.is_same(tensor)) {
          known.written |= plan.written[argument] != 0;
          return known.alias;
        }
      }
    }
    if (!plan.resizes && freed(tensor)) {
      no_memory(tensor, argument);
    }
    return add(tensor, plan.written[argument]);
  }

  at::Tensor add(const at::Tensor& tensor, bool written) {
    auto alias = counting_ ? counting_alias(tensor) : plain_alias(tensor);
    tensors_.push_back({tensor, alias, written});
    by_alias_.emplace_back(alias.unsafeGetTensorImpl());
    return alias;
  }

  // -1 when no tensor and no device said which.
  c10::DeviceIndex index() const {
    return index_;
  }
  void set_index(c10::DeviceIndex index) {
    index_ = index;
  }

  // What a kernel did to its written arguments besides writing elements: new sizes, new or grown storages.
  void deliver() {
    for (const auto& [tensor, alias, written] : tensors_) {
      if (!written) {
        continue;
      }
      auto* impl = tensor.unsafeGetTensorImpl();
      const auto& storage = alias.storage();
      if (!is_alias_storage(storage)) {  // the kernel gave the tensor another storage (`set_`)
        impl->set_storage_keep_dtype(adopt_storage(storage, tensor.device().index()));
      } else if (storage.data() != tensor.storage().data() || storage.nbytes() != tensor.storage().nbytes()) {
        replace_bytes(tensor.storage(), storage);
      }
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides() ||
          alias.storage_offset() != tensor.storage_offset()) {
        impl->set_storage_offset(alias.storage_offset());
        impl->set_sizes_and_strides(alias.sizes(), alias.strides());
      }
      if (alias.is_conj() != tensor.is_conj() || alias.is_neg() != tensor.is_neg()) {  // linalg.lu_solve, say
        tensor._set_conj(alias.is_conj());
        tensor._set_neg(alias.is_neg());
      }
    }
  }

  // A result of the CPU kernel as a tpu tensor.
  at::Tensor result(const at::Tensor& result, c10::DeviceIndex index) const {
    if (!result.defined() || result.device().type() == kTpu) {
      return result;
    }
    for (size_t i = 0; i < by_alias_.size(); ++i) {
      if (by_alias_[i] == result.unsafeGetTensorImpl()) {
        // An op that writes returns its argument. A few others return an argument as it is, which their
        // schema does not say: that is copied, so that every result owns its memory.
        return tensors_[i].written ? tensors_[i].tensor : from_cpu(result.clone(), index);
      }
    }
    if (result.layout() != c10::kStrided || result.is_quantized()) {
      refuse_layout(op_.schema().name(), result.is_quantized() ? "quantized" : layout_name(result.layout()));
    }
    if (result.device().type() != c10::kCPU) {
      return result;
    }
    return from_cpu(result.has_storage() && is_alias_storage(result.storage()) ? result.clone() : result, index);
  }

 private:
  static constexpr size_t kSearched = 16;  // long lists hold distinct tensors; searching them would be quadratic

  struct Entry {
    at::Tensor tensor, alias;
    bool written;
  };

  at::Tensor plain_alias(const at::Tensor& tensor) {
    return tensor._is_zerotensor() ? cpu_alias(tensor) : on_storage(storage_of(tensor.storage()), tensor);
  }

  // An alias that has the tensor's version counter, or has none where the tensor has none.
  at::Tensor counting_alias(const at::Tensor& tensor) {
    std::optional<c10::InferenceMode> mode;
    if (tensor.is_inference() != c10::InferenceMode::is_enabled()) {
      mode.emplace(tensor.is_inference());
    }
    auto alias = plain_alias(tensor);
    alias.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
    return alias;
  }

  // Tensors of one storage get aliases of one storage: torch's checks for overlapping memory compare storages.
  c10::Storage storage_of(const c10::Storage& storage) {
    auto* impl = storage.unsafeGetStorageImpl();
    if (many_.empty()) {
      for (const auto& [known, alias] : few_) {
        if (known == impl) {
          return alias;
        }
      }
      few_.emplace_back(impl, host_storage(storage));
      const auto found = few_.back().second;
      if (few_.size() > kSearched) {
        many_.insert(few_.begin(), few_.end());
      }
      return found;
    }
    auto& alias = many_[impl];
    if (!alias) {
      alias = host_storage(storage);
      few_.emplace_back(impl, alias);
    }
    return alias;
  }

  bool is_alias_storage(const c10::Storage& storage) const {
    for (const auto& [known, alias] : few_) {
      if (alias.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return true;
      }
    }
    return false;
  }

  [[noreturn]] void no_memory(const at::Tensor& tensor, size_t argument) const {
    const auto& schema = op_.schema();
    TORCH_CHECK(
        false,
        schema.name(), ": argument '", schema.arguments()[argument].name(), "' of shape ", tensor.sizes(),
        " has no memory: its storage was resized to 0 bytes. Resize it back before using the tensor.");
  }

  [[noreturn]] void mixed_devices(c10::Device other, size_t argument) const {
    const auto& schema = op_.schema();
    TORCH_CHECK(
        false,
        "Expected all tensors to be on the same device, but found at least two devices, tpu:",
        index_ < 0 ? 0 : int(index_), " and ", other, "! (when checking argument '",
        schema.arguments()[argument].name(), "' of ", schema.name(), "; move it with .to('tpu'))");
  }

  const c10::OperatorHandle& op_;
  const bool counting_;  // the kernel counts the versions of what it writes
  c10::DeviceIndex index_ = -1;
  c10::SmallVector<Entry, 6> tensors_;
  c10::SmallVector<const c10::TensorImpl*, 6> by_alias_;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 6> few_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> many_;
};

// Lends the random stream of a tpu generator to kernels that draw from the default CPU generator and take no
// other. The lock keeps two lenders apart.
class LentGenerator {
 public:
  explicit LentGenerator(c10::DeviceIndex device)
      : lock_(mutex()),
        cpu_(at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator())),
        lent_(at::check_generator<at::CPUGeneratorImpl>(host_of(device))) {
    swap();
  }
  ~LentGenerator() {
    swap();
  }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }
  at::Generator& host_of(c10::DeviceIndex device) {
    host_ = host_generator(default_generator(device));
    return host_;
  }
  void swap() {
    std::scoped_lock both(cpu_->mutex_, lent_->mutex_);
    const auto engine = cpu_->engine();
    const auto single = cpu_->next_float_normal_sample();
    const auto twice = cpu_->next_double_normal_sample();
    cpu_->set_engine(lent_->engine());
    cpu_->set_next_float_normal_sample(lent_->next_float_normal_sample());
    cpu_->set_next_double_normal_sample(lent_->next_double_normal_sample());
    lent_->set_engine(engine);
    lent_->set_next_float_normal_sample(single);
    lent_->set_next_double_normal_sample(twice);
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator host_;
  at::CPUGeneratorImpl* cpu_;
  at::CPUGeneratorImpl* lent_;
};

// Copy the inputs that share memory with what the op writes. `mm(a, b, out=a)` is right on a TPU, where results are
// written at the end; torch's CPU kernels, which write as they go, would read what they have written, unnoticed.
void separate_inputs(const Plan& plan, torch::jit::Stack* stack, size_t base) {
  c10::SmallVector<const c10::StorageImpl*, 4> written;
  const auto storage = [](const at::Tensor& tensor) -> const c10::StorageImpl* {
    return tensor.defined() && tensor.device().type() == kTpu && tensor.numel() && tensor.has_storage()
        ? tensor.storage().unsafeGetStorageImpl()
        : nullptr;
  };
  for (size_t i = 0; i < plan.written.size(); ++i) {
    if (plan.written[i] && (*stack)[base + i].isTensor()) {
      written.push_back(storage((*stack)[base + i].toTensor()));
    }
  }
  const auto shares = [&](const at::Tensor& tensor) {
    const auto* own = storage(tensor);
    return own && std::find(written.begin(), written.end(), own) != written.end();
  };
  for (size_t i = 0; i < plan.written.size(); ++i) {
    auto& value = (*stack)[base + i];
    if (plan.written[i]) {
      continue;
    }
    if (value.isTensor() && shares(value.toTensor())) {
      value = value.toTensor().clone();
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      if (std::any_of(tensors.begin(), tensors.end(), shares)) {
        c10::List<at::Tensor> replaced;
        for (const auto& tensor : tensors) {
          replaced.push_back(shares(tensor) ? tensor.clone() : tensor);
        }
        value = std::move(replaced);
      }
    }
  }
}

// Replace the tpu tensors and devices among the arguments. Returns whether the result was asked for on the CPU.
bool replace_arguments(
    const c10::OperatorHandle& op, const Plan& plan, torch::jit::Stack* stack, size_t base, Aliases& aliases) {
  bool to_cpu = false;
  for (size_t i = 0; i < plan.written.size(); ++i) {
    auto& value = (*stack)[base + i];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined()) {
        value = aliases.of(tensor, i, plan);
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> replaced;
      for (const auto& tensor : value.toTensorVector()) {
        replaced.push_back(aliases.of(tensor, i, plan));
      }
      value = std::move(replaced);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> replaced;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        replaced.push_back(tensor ? std::optional(aliases.of(*tensor, i, plan)) : tensor);
      }
      value = std::move(replaced);
    } else if (value.isDevice()) {
      const auto device = value.toDevice();
      if (device.type() == kTpu) {
        const auto index = checked_index(device.index());
        if (aliases.index() < 0) {
          aliases.set_index(index);
        }
        value = c10::Device(c10::kCPU);
      } else {
        to_cpu = true;
      }
    }
  }
  const auto index = aliases.index() < 0 ? current_device() : aliases.index();
  for (const auto i : plan.generators) {
    auto& value = (*stack)[base + i];
    if (value.isNone()) {
      value = host_generator(default_generator(index));
      continue;
    }
    const auto generator = value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kTpu,
        op.schema().name(), ": expected a generator of the device 'tpu', got one of '", generator.device(),
        "'; make it with torch.Generator(device='tpu')");
    value = host_generator(generator);
  }
  aliases.set_index(index);
  return to_cpu;
}

void replace_results(torch::jit::Stack* stack, size_t count, const Aliases& aliases) {
  const auto index = aliases.index();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.result(value.toTensor(), index);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> replaced;
      for (const auto& tensor : value.toTensorVector()) {
        replaced.push_back(aliases.result(tensor, index));
      }
      value = std::move(replaced);
    }
  }
}

}  // namespace

void set_host_arguments(const std::string& op, std::vector<std::string> arguments) {
  host_arguments()[op] = std::move(arguments);
}

void set_reads_again(const std::string& op, bool reads_again) {
  reading_again()[op] = reads_again;
}

std::string layout_name(c10::Layout layout) {
  switch (layout) {
    case c10::kSparse:
      return "sparse_coo";
    case c10::kSparseCsr:
      return "sparse_csr";
    case c10::kSparseCsc:
      return "sparse_csc";
    case c10::kSparseBsr:
      return "sparse_bsr";
    case c10::kSparseBsc:
      return "sparse_bsc";
    case c10::kJagged:
      return "jagged";
    default:
      return c10::str(layout);
  }
}

void refuse_layout(const std::string& op, const std::string& layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      op, ": the simulated tpu device holds dense (strided) tensors only, not ", layout,
      " ones. Move the operands with .cpu() first.");
}

void on_metadata(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(kCpuKeys, stack);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& plan = plan_of(op);
  if (plan.view) {
    op.redispatchBoxed(kCpuKeys, stack);
    return;
  }
  // torch counts the versions of what most ops write, on every device, and then keeps the ops inside from counting
  // again. Where it does not (ops on lists, some ops of libraries), those inside the CPU kernel count.
  const bool counting = plan.writes && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
  BelowAutograd below(counting);
  Aliases aliases(op, counting);
  const size_t base = stack->size() - plan.written.size();
  if (plan.reads_again) {
    separate_inputs(plan, stack, base);
  }
  const bool to_cpu = replace_arguments(op, plan, stack, base, aliases);
  if (plan.draws_unasked) {
    LentGenerator lent(aliases.index());
    op.redispatchBoxed(kCpuKeys, stack);
  } else {
    op.redispatchBoxed(kCpuKeys, stack);
  }
  if (plan.writes) {
    aliases.deliver();
  }
  if (!to_cpu) {
    replace_results(stack, op.schema().returns().size(), aliases);
  }
}

}  // namespace tpu
