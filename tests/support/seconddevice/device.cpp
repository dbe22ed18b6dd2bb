// A device that is not the CPU, for tests: torch's PrivateUse1, computed in host memory by the CPU's own kernels.
//
// Its allocator fills memory with ones (NaN), frees it for real, and has a limit. Its kernels refuse tensors in host
// memory. Its streams are late: what is queued runs only when something needs it, so a wait that is missing shows in
// the numbers. What runs too early would not show, because kernels are done at once; so each block of memory knows
// which stream touched it at which time (vector clocks), and work that is not ordered behind them is an error.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);  // its header takes long to compile
}

namespace {

using at::Tensor;
using c10::IValue;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST_STREAMS = 33;
constexpr int ALIGNMENT = 256;
const c10::Device DEVICE(KIND, 0);

// ---------------------------------------------------------------- time

using Clock = std::array<long, MOST_STREAMS>;  // of each stream, what is known to be done before

void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < MOST_STREAMS; ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Block {  // of the device's memory
  void* address;
  size_t nbytes;
  int stream;  // that was current when it was allocated: it may be used there until it is freed, in that stream's order
  Clock read{}, written{};
};

struct Happening {  // a place in a stream; what torch calls an event
  int stream;
  long position;
  Clock clock;
};

struct Work {
  std::function<void()> run;
  std::shared_ptr<Happening> after;  // it only waits
  Block *source = nullptr, *target = nullptr;
  uintptr_t host = 0;  // memory of the host that it reads or writes
};

struct Lane {  // a stream
  std::deque<Work> queue;
  long queued = 0, done = 0;
  Clock clock{};
};

std::recursive_mutex mutex;
std::array<Lane, MOST_STREAMS> lanes;
int num_lanes = 1;
thread_local int current = 0;
thread_local Clock host{};  // what this thread has waited for
std::map<uintptr_t, std::unique_ptr<Block>> blocks;
std::map<uintptr_t, size_t> pinned;
size_t used = 0, peak = 0, limit = size_t(16) << 30;
long kernel_count = 0, host_waits = 0, host_synchronizations = 0;
std::string violation;
bool order_checked = true;
std::unique_ptr<std::mt19937> chance;  // of what runs when; none: everything as late as can be
std::map<std::string, long> waits_by_name;

using Lock = std::lock_guard<std::recursive_mutex>;

void run_until(int stream, long position) {
  Lane& lane = lanes[stream];
  while (lane.done < position && !lane.queue.empty()) {
    Work work = std::move(lane.queue.front());
    lane.queue.pop_front();
    if (work.after && work.after->stream != stream) run_until(work.after->stream, work.after->position);
    if (work.run) work.run();
    ++lane.done;
  }
}

void run_all(int stream) { run_until(stream, lanes[stream].queued); }

void perhaps_run() {  // where chance has a say, streams run ahead of their need
  if (!chance) return;
  const int stream = (*chance)() % num_lanes;
  Lane& lane = lanes[stream];
  for (long count = (*chance)() % 3; count && !lane.queue.empty(); --count) run_until(stream, lane.done + 1);
}

void queue(int stream, Work work) {
  lanes[stream].queue.push_back(std::move(work));
  ++lanes[stream].queued;
  perhaps_run();
}

void count_wait(const std::string& name) {
  ++host_waits;
  ++waits_by_name[name];
}

void host_waits_for(int stream) {
  run_all(stream);
  join(host, lanes[stream].clock);
  ++lanes[stream].clock[stream];  // what is queued from now on is not waited for
}

void raise_violation() {
  std::string text;
  text.swap(violation);
  TORCH_CHECK(text.empty(), "second device: ", text);
}

void give_back(void* context);

Block* block_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND || !tensor.has_storage()) return nullptr;
  const at::DataPtr& memory = tensor.storage().data_ptr();
  // Host memory that was made a tensor of this device, as where both share it, is not of its allocator.
  return memory.get_deleter() == &give_back ? static_cast<Block*>(memory.get_context()) : nullptr;
}

void check_order(const Block* block, bool writes, int stream, const std::string& name) {
  if (!order_checked) return;
  const Clock& known = lanes[stream].clock;
  for (int other = 0; other < num_lanes; ++other) {
    if (other == stream) continue;
    const bool early = block->written[other] > known[other] || (writes && block->read[other] > known[other]);
    TORCH_CHECK(!early, "second device: ", name, " on stream ", stream, writes ? " writes" : " reads", " memory (",
                block->nbytes, " bytes) that stream ", other, " may still be working with: a wait is missing");
  }
}

void touch(Block* block, bool writes, int stream, const std::string& name) {
  if (!block) return;
  check_order(block, writes, stream, name);
  auto& times = writes ? block->written : block->read;
  times[stream] = lanes[stream].clock[stream];
}

void begin(int stream) {  // of what a thread queues now: it comes after all that the thread has waited for
  raise_violation();
  join(lanes[stream].clock, host);
}

// ---------------------------------------------------------------- memory

void free_now(Block* block) {
  std::memset(block->address, 0xFF, block->nbytes);
  std::free(block->address);
  used -= block->nbytes;
  blocks.erase(reinterpret_cast<uintptr_t>(block));
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  Lock lock(mutex);
  if (block->stream != 0) {
    queue(block->stream, {[block] { free_now(block); }, nullptr});
    return;
  }
  join(lanes[0].clock, host);
  for (int stream = 1; stream < num_lanes; ++stream)
    if (order_checked && std::max(block->read[stream], block->written[stream]) > lanes[0].clock[stream])
      violation = "memory (" + std::to_string(block->nbytes) + " bytes) was freed while stream " +
                  std::to_string(stream) + " may still be working with it: a wait is missing";
  run_all(0);
  for (int stream = 1; stream < num_lanes; ++stream)  // never into memory that is no longer there
    for (bool again = true; again;) {
      again = false;
      for (const Work& work : lanes[stream].queue) again = again || work.source == block || work.target == block;
      if (again) run_until(stream, lanes[stream].done + 1);
    }
  free_now(block);
}

struct DeviceMemory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &give_back, DEVICE};
    Lock lock(mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, used + nbytes <= limit, "second device out of memory: ", nbytes,
                     " bytes were asked for, ", used, " of ", limit, " are in use");
    const size_t room = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto block = std::make_unique<Block>(Block{std::aligned_alloc(ALIGNMENT, room), nbytes, current});
    std::memset(block->address, 0xFF, nbytes);
    // Its last owner may have let it go while work in that stream was still queued.
    block->written[current] = lanes[current].clock[current];
    used += nbytes;
    peak = std::max(peak, used);
    Block* kept = block.get();
    blocks[reinterpret_cast<uintptr_t>(kept)] = std::move(block);
    return {kept->address, kept, &give_back, DEVICE};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(used);
      (*bytes)[0].peak = static_cast<int64_t>(peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = used; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) { return {limit - std::min(used, limit), limit}; }
};

void unpin(void* address) {
  Lock lock(mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(address));
  // torch's own allocators of such memory let it go only after the copies with it that are queued.
  for (int stream = 0; stream < num_lanes; ++stream) run_all(stream);
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    void* address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    Lock lock(mutex);
    pinned[reinterpret_cast<uintptr_t>(address)] = nbytes;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

bool is_pinned(const void* address) {
  Lock lock(mutex);
  auto place = pinned.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (place == pinned.begin()) return false;
  --place;
  return reinterpret_cast<uintptr_t>(address) < place->first + place->second;
}

DeviceMemory device_memory;
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// ---------------------------------------------------------------- streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  static Happening* of(void* event) { return static_cast<std::shared_ptr<Happening>*>(event)->get(); }

  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock(mutex);
    static int asked = 0;
    const int id = 1 + asked++ % (MOST_STREAMS - 1);  // from a pool, as CUDA's
    lanes[id].clock[id] = std::max(lanes[id].clock[id], 1L);
    num_lanes = std::max(num_lanes, id + 1);
    return stream(id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    const int before = current;
    current = static_cast<int>(other.id());
    return stream(before);
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    const int id = static_cast<int>(on.id());
    Lane& lane = lanes[id];
    join(lane.clock, host);
    auto happening = std::make_shared<Happening>(Happening{id, lane.queued, lane.clock});
    ++lane.clock[id];
    if (*event) {
      *static_cast<std::shared_ptr<Happening>*>(*event) = happening;
    } else {
      *event = new std::shared_ptr<Happening>(happening);
    }
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    Lock lock(mutex);
    auto happening = *static_cast<std::shared_ptr<Happening>*>(event);
    const int id = static_cast<int>(on.id());
    join(lanes[id].clock, happening->clock);
    queue(id, {nullptr, happening});
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock(mutex);
    const Happening* happening = of(event);
    const bool happened = lanes[happening->stream].done >= happening->position;
    if (happened) {
      join(host, happening->clock);
    } else {
      run_until(happening->stream, lanes[happening->stream].done + 1);  // so that who asks again gets on
    }
    return happened;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(mutex);
    const Happening* happening = of(event);
    if (lanes[happening->stream].done < happening->position) ++host_synchronizations;
    run_until(happening->stream, happening->position);
    join(host, happening->clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Happening>*>(event);
  }
  bool queryStream(const c10::Stream& on) const override {
    Lock lock(mutex);
    return lanes[on.id()].queue.empty();
  }
  void synchronizeStream(const c10::Stream& on) const override {
    Lock lock(mutex);
    ++host_synchronizations;
    host_waits_for(static_cast<int>(on.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Lock lock(mutex);
    ++host_synchronizations;
    for (int id = 0; id < num_lanes; ++id) host_waits_for(id);
    raise_violation();
  }
};

// ---------------------------------------------------------------- tensors that share memory

Tensor over(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
            at::IntArrayRef strides, int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides, offset);
  return Tensor(std::move(impl));
}

Tensor view_of(const Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset,
               std::optional<caffe2::TypeMeta> dtype = std::nullopt) {
  return over(base.storage(), base.key_set(), dtype.value_or(base.dtype()), sizes, strides, offset);
}

// The same bytes as tensors of the CPU, during one call of a kernel.
struct Aliases {
  std::map<c10::StorageImpl*, c10::Storage> of;                // device storage -> host storage
  std::map<c10::StorageImpl*, Tensor> tensor_of;               // host storage -> a device tensor in its bytes

  Tensor alias(const Tensor& tensor) {
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    auto place = of.find(key);
    if (place == of.end()) {
      c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                           at::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::kCPU)), nullptr, false);
      place = of.emplace(key, storage).first;
      tensor_of[storage.unsafeGetStorageImpl()] = tensor;
    }
    return over(place->second, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype(), tensor.sizes(),
                tensor.strides(), tensor.storage_offset());
  }

  Tensor back(const Tensor& host_tensor) {
    if (!host_tensor.defined()) return host_tensor;
    auto place = tensor_of.find(host_tensor.storage().unsafeGetStorageImpl());
    if (place != tensor_of.end())
      return view_of(place->second, host_tensor.sizes(), host_tensor.strides(), host_tensor.storage_offset(),
                     host_tensor.dtype());
    const Tensor source = host_tensor.is_non_overlapping_and_dense() ? host_tensor : host_tensor.contiguous();
    Tensor copy = at::detail::empty_strided_generic(source.sizes(), source.strides(), &device_memory,
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                    source.scalar_type());
    if (source.numel()) std::memcpy(copy.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    return copy;
  }
};

// ---------------------------------------------------------------- kernels: the CPU's, on the same bytes

// What their kernels return depends on values, so the host has to wait for them.
const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::_unique",
    "aten::argwhere"};
// CUDA's kernels for these load weights 16 bytes at a time.
const std::set<std::string> ALIGNED = {"aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_mm",
                                       "aten::_int_mm"};
const std::set<std::string> PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm"};  // faster there where they are aligned
// Indices may be in host memory, and are then copied.
const std::set<std::string> WITH_HOST_INDICES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                 "aten::index_put", "aten::_unsafe_index", "aten::_unsafe_index_put"};
long unaligned_products = 0;

// Run the CPU's kernel. A few operations have another name there, or take fewer dtypes than on accelerators.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  const auto other = [&](const char* its_name) {
    c10::Dispatcher::singleton().findSchemaOrThrow(its_name, "").callBoxed(stack);
  };
  const c10::impl::ExcludeDispatchKeyGuard no_graph(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (name == "aten::convolution_overrideable") return other("aten::convolution");
  if (name == "aten::convolution_backward_overrideable") {
    constexpr int NUM_ARGUMENTS = 10;
    auto weight = stack->end() - NUM_ARGUMENTS + 2;
    const bool transposed = (weight + 4)->toBool();
    const int64_t channels = weight->toTensor().size(transposed ? 1 : 0) * (transposed ? (weight + 6)->toInt() : 1);
    stack->insert(weight + 1, IValue(std::vector<int64_t>{channels}));
    return other("aten::convolution_backward");
  }
  IValue& input = *(stack->end() - static_cast<long>(op.schema().arguments().size()));
  if (name == "aten::histc" && at::isIntegralType(input.toTensor().scalar_type(), true)) {
    const at::ScalarType dtype = input.toTensor().scalar_type();
    input = input.toTensor().to(at::kDouble);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    stack->back() = stack->back().toTensor().to(dtype);
    return;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  std::vector<IValue> given(stack->begin() + static_cast<long>(first), stack->end());
  std::vector<std::pair<Tensor, Tensor>> resized;  // device tensors that the kernel gives a size
  Aliases aliases;
  const int stream = current;
  {
    Lock lock(mutex);
    begin(stream);
    perhaps_run();
    run_all(stream);
    ++kernel_count;
    if (WAITING.count(name)) count_wait(name);
  }
  auto host_version = [&](const Tensor& tensor, bool writes, bool index) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != KIND) {
      if (tensor.dim() > 0 && index) {
        Lock lock(mutex);
        count_wait(name);
      }
      TORCH_CHECK(tensor.dim() == 0 || index, "second device: ", name, " was given a tensor on two devices: one is on ",
                  tensor.device(), ", of shape ", tensor.sizes());
      return tensor;
    }
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    if (tensor.dim() >= 2 && tensor.numel() && address % 16) {
      Lock lock(mutex);
      unaligned_products += static_cast<long>(PRODUCTS.count(name));
      TORCH_CHECK(!ALIGNED.count(name), "second device: ", name,
                  " expected data_ptr to be aligned to 16 bytes, and it is at ", address % 16, " mod 16");
    }
    {
      Lock lock(mutex);
      touch(block_of(tensor), writes, stream, name);
      if (index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) count_wait(name);
    }
    if (writes && tensor.numel() == 0) {
      Tensor empty = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
      resized.emplace_back(tensor, empty);
      return empty;
    }
    return aliases.alias(tensor);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[first + i];
    const auto* alias_info = arguments[i].alias_info();
    const bool writes = alias_info && alias_info->isWrite();
    const bool index = WITH_HOST_INDICES.count(name) && i == 1;
    if (value.isTensor()) {
      value = host_version(value.toTensor(), writes, false);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(host_version(tensor, writes, index));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional<Tensor>(host_version(*tensor, writes, index)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }
  run_on_cpu(op, stack);
  for (auto& [device_tensor, host_tensor] : resized) {
    if (host_tensor.numel() == 0 && host_tensor.sizes() == device_tensor.sizes()) continue;
    const Tensor result = aliases.back(host_tensor);
    device_tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(result.storage());
    device_tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
  }
  const auto& returns = schema.returns();
  const size_t first_return = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    IValue& value = (*stack)[first_return + i];
    const auto* alias_info = returns[i].alias_info();
    if (alias_info && alias_info->isWrite()) {
      for (size_t k = 0; k < arguments.size(); ++k)
        if (arguments[k].alias_info() && *arguments[k].alias_info() == *alias_info) value = given[k];
    } else if (value.isTensor()) {
      value = aliases.back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(aliases.back(tensor));
      value = tensors;
    }
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  const int64_t begins = offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset();
  return view_of(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begins);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  const at::DimVector sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride");
  return view_of(self, sizes, *strides, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return view_of(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), self.storage_offset());
}

// In the queue of the current stream. With memory that is not page-locked the host waits, as CUDA's does.
Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Lock lock(mutex);
  const int stream = current;
  begin(stream);
  Aliases aliases;
  const bool up = self.device().type() != KIND, down = target.device().type() != KIND;
  auto host_view = [&](const Tensor& tensor) {
    if (tensor.device().type() == KIND) return aliases.alias(tensor);
    // Without holding the memory: nothing that is queued on a device keeps it.
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                         at::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU)), nullptr, false);
    return over(storage, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype(), tensor.sizes(), tensor.strides(),
                tensor.storage_offset());
  };
  const Tensor source_view = host_view(self), target_view = host_view(target);
  source_view._set_conj(self.is_conj());
  source_view._set_neg(self.is_neg());
  target_view._set_conj(target.is_conj());
  target_view._set_neg(target.is_neg());
  touch(block_of(self), false, stream, "a copy");
  touch(block_of(target), true, stream, "a copy");
  auto run = [source_view, target_view] {
    c10::impl::ExcludeDispatchKeyGuard no_modes(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    target_view.copy_(source_view);
  };
  const Tensor& host_tensor = up ? self : target;
  const auto host_address = up || down ? reinterpret_cast<uintptr_t>(host_tensor.const_data_ptr()) : 0;
  queue(stream, {run, nullptr, block_of(self), block_of(target), host_address});
  const bool pageable = (up || down) && host_tensor.numel() && !is_pinned(host_tensor.const_data_ptr());
  const bool scalar = up && host_tensor.dim() == 0;  // travels with the launch of a kernel
  if ((up || down) && (!non_blocking || pageable)) {
    if (!scalar) count_wait(up ? "copy to the device" : "copy to the host");
    host_waits_for(stream);
  } else if (!up && !down && stream == 0) {
    run_all(stream);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  const_cast<Tensor&>(target).resize_(self.sizes());
  return copy_from(self, target, false);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const int64_t count = c10::multiply_integers(sizes);
  const size_t needed = static_cast<size_t>(self.storage_offset() + count) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    at::DataPtr memory = device_memory.allocate(needed);
    if (self.storage().nbytes()) std::memcpy(memory.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(memory));
    self.storage().set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides = stride.empty() ? c10::TensorType::contiguousStridesOf(C10_AS_INTARRAYREF_SLOW(size))
                                                : C10_AS_INTARRAYREF_SLOW(stride).vec();
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), strides,
                                                    offset.guard_int(__FILE__, __LINE__));
  return self;
}

// ---------------------------------------------------------------- autocast

const std::set<std::string> IN_HALF = {
    "aten::_convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::addmm", "aten::addmv", "aten::addr",
    "aten::matmul", "aten::einsum", "aten::mm", "aten::mv", "aten::linalg_vecdot", "aten::linear", "aten::addbmm",
    "aten::baddbmm", "aten::bmm", "aten::chain_matmul", "aten::linalg_multi_dot", "aten::scaled_dot_product_attention"};
const std::set<std::string> IN_FULL = {
    "aten::acos", "aten::asin", "aten::cosh", "aten::erfinv", "aten::exp", "aten::expm1", "aten::log", "aten::log10",
    "aten::log2", "aten::log1p", "aten::reciprocal", "aten::rsqrt", "aten::sinh", "aten::tan", "aten::pow",
    "aten::softplus", "aten::layer_norm", "aten::native_layer_norm", "aten::group_norm", "aten::norm",
    "aten::nuclear_norm", "aten::cosine_similarity", "aten::cdist", "aten::dist", "aten::renorm", "aten::logsumexp",
    "aten::softmax", "aten::log_softmax", "aten::cumprod", "aten::cumsum", "aten::sum", "aten::prod",
    "aten::mse_loss", "aten::kl_div", "aten::nll_loss", "aten::cross_entropy_loss", "aten::rms_norm"};

void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  const std::string& name = op.schema().name();
  const bool half = IN_HALF.count(name), full = IN_FULL.count(name);
  if (half || full) {
    const at::ScalarType dtype = half ? at::autocast::get_autocast_dtype(KIND) : at::kFloat;
    auto cast = [&](const Tensor& tensor) {
      const bool wanted = tensor.defined() && tensor.device().type() == KIND && tensor.is_floating_point() &&
                          tensor.scalar_type() != at::kDouble;
      return wanted ? tensor.to(dtype) : tensor;
    };
    for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
      IValue& value = (*stack)[i];
      if (value.isTensor()) {
        value = cast(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(cast(tensor));
        value = tensors;
      }
    }
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  // These have a kernel for all devices, which says that a device must bring its own.
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}
// A copy of a conjugated tensor is made by the copy itself, as on every device.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&autocast>());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

// ---------------------------------------------------------------- what tests set and ask, called through ctypes
extern "C" {
void second_begin() {
  static Hooks hooks;
  lanes[0].clock[0] = 1;
  c10::SetAllocator(KIND, &device_memory, 1);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void second_set_limit(size_t nbytes) { Lock lock(mutex); limit = nbytes; }
void second_set_course(long seed) {  // negative: as late as can be
  Lock lock(mutex);
  chance = seed < 0 ? nullptr : std::make_unique<std::mt19937>(static_cast<unsigned>(seed));
}
void second_check_order(bool checked) { Lock lock(mutex); order_checked = checked; }
void second_register(uintptr_t address, size_t nbytes) { Lock lock(mutex); pinned[address] = nbytes; }
void second_unregister(uintptr_t address) {
  Lock lock(mutex);
  auto place = pinned.find(address);
  if (place == pinned.end()) return;
  const uintptr_t end = address + place->second;
  pinned.erase(place);
  for (int stream = 0; stream < num_lanes; ++stream) {
    const auto& pending = lanes[stream].queue;
    const bool used = std::any_of(pending.begin(), pending.end(), [&](const Work& work) {
      return work.host >= address && work.host < end;
    });
    if (!used) continue;
    violation = "host memory was unlocked while a copy on stream " + std::to_string(stream) + " was under way with it";
    run_all(stream);
  }
}
size_t second_used() { Lock lock(mutex); return used; }
size_t second_peak() { Lock lock(mutex); return peak; }
size_t second_limit() { Lock lock(mutex); return limit; }
void second_reset_peak() { Lock lock(mutex); peak = used; }
long second_kernels() { Lock lock(mutex); return kernel_count; }
long second_host_waits() { Lock lock(mutex); return host_waits; }
long second_host_synchronizations() { Lock lock(mutex); return host_synchronizations; }
long second_unaligned_products() { Lock lock(mutex); return unaligned_products; }
const char* second_waits() {
  static std::string text;
  Lock lock(mutex);
  text.clear();
  for (const auto& [name, count] : waits_by_name) text += name + "=" + std::to_string(count) + ";";
  return text.c_str();
}
void second_forget_waits() { Lock lock(mutex); waits_by_name.clear(); host_waits = 0; host_synchronizations = 0; }
}
