// A PrivateUse1 backend whose every decision is made in Python.
//
// Guard, allocators and hooks pass each question on to the object given to `install` (../runtime.py). What stays here is
// what torch asks for only in C++: the current device and stream of a thread, generators, empty tensors and views, and
// the signal that says that the host touched a guarded page of pinned memory. Kernels are a boxed fallback in Python.

#include "extension.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

PyObject* runtime = nullptr;  // never freed: destructors ask it until the process ends
int8_t num_devices = 1;
thread_local int8_t current_device = 0;
thread_local std::map<int, int64_t> current_streams;  // by device; a device without an entry is on stream 0

int64_t current_stream(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

int index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }

template <class Result, class... Arguments>
Result ask(const char* name, Arguments... arguments) {
  py::gil_scoped_acquire gil;
  py::object answer = py::reinterpret_borrow<py::object>(runtime).attr(name)(arguments...);
  if constexpr (!std::is_void_v<Result>) return answer.cast<Result>();
}

// For destructors, which may not throw and may run while the interpreter ends.
template <class... Arguments>
void tell(const char* name, Arguments... arguments) noexcept {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  py::error_scope raised;  // a tensor may die of an exception on its way, which Python must not see meanwhile
  try {
    py::reinterpret_borrow<py::object>(runtime).attr(name)(arguments...);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable(name);
  }
}

int64_t number(void* handle) { return reinterpret_cast<int64_t>(handle); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }

  c10::Device getDevice() const override { return {KIND, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }

  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ask<int64_t>("new_stream", index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = stream(to.device(), current_stream(to.device_index()));
    current_streams[to.device_index()] = to.id();
    return before;
  }

  // An event's handle is the number that the runtime gave it at its first recording.
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto answer = ask<int64_t>("record", number(*event), int(on.device_index()), on.id());
    *event = reinterpret_cast<void*>(answer);
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) ask<void>("block", number(event), int(on.device_index()), on.id());
  }
  bool queryEvent(void* event) const override { return !event || ask<bool>("query", number(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) ask<void>("synchronize_event", number(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) tell("destroy", number(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return ask<double>("elapsed_ms", number(begin), number(end));
  }

  bool queryStream(const c10::Stream& on) const override {
    return ask<bool>("query_stream", int(on.device_index()), on.id());
  }
  void synchronizeStream(const c10::Stream& on) const override {
    ask<void>("synchronize_stream", int(on.device_index()), on.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    ask<void>("synchronize", int(device < 0 ? current_device : device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& on) const override {
    ask<void>("record_stream", number(memory.get()), int(on.device_index()), on.id());
  }
};

void release(void* memory) {
  if (memory) tell("free", number(memory));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    if (size) {
      auto answer = ask<int64_t>("allocate", int64_t(size), int(current_device), current_stream(current_device));
      memory = reinterpret_cast<void*>(answer);
    }
    return {memory, memory, &release, c10::Device(KIND, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "emulated: copy_data is not queued; use copy_");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { ask<void>("empty_cache"); }
  void recordStream(const c10::DataPtr& memory, c10::Stream on) override {
    ask<void>("record_stream", number(memory.get()), int(on.device_index()), on.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto found = ask<std::vector<int64_t>>("statistics", int(device));  // allocated, its peak, reserved, its peak
    c10::CachingDeviceAllocator::DeviceStats statistics;
    statistics.allocated_bytes[0].current = found[0];
    statistics.allocated_bytes[0].peak = found[1];
    statistics.reserved_bytes[0].current = found[2];
    statistics.reserved_bytes[0].peak = found[3];
    return statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { ask<void>("reset_peak", int(device)); }
} device_memory;

// Pinned memory has pages of its own, so that the runtime can guard those that a queued copy still needs.
std::mutex pinned_lock;
std::map<char*, size_t> pinned;  // first byte -> bytes that were mapped
struct sigaction segv_before, trap_before;

size_t page_size() { return size_t(sysconf(_SC_PAGESIZE)); }

bool is_pinned(const void* address) {
  std::lock_guard lock(pinned_lock);
  auto found = pinned.upper_bound((char*)address);
  return found != pinned.begin() && (--found, (char*)address < found->first + found->second);
}

void unpin(void* memory) {
  tell("unpinned", number(memory));
  std::lock_guard lock(pinned_lock);
  munmap(memory, pinned[(char*)memory]);
  pinned.erase((char*)memory);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    size_t mapped = (std::max(size, size_t(1)) + page_size() - 1) / page_size() * page_size();
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "emulated: no pinned memory for ", size, " bytes");
    std::lock_guard lock(pinned_lock);
    pinned[(char*)memory] = mapped;
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // a queued copy holds its tensor
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

// Guard the pages of these bytes: 0 forbids all access, 1 forbids writing, 2 allows everything.
void guard_pages(int64_t address, int64_t size, int access) {
  constexpr int PROTECTIONS[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE};
  int64_t first = address / page_size() * page_size();
  int failed = mprotect(reinterpret_cast<void*>(first), address + size - first, PROTECTIONS[access]);
  TORCH_CHECK(!failed, "emulated: mprotect of ", size, " bytes failed");
}

// The host touched a guarded page. Calling Python is safe here: the fault is synchronous, in code that reads or writes a
// tensor, and so in none that holds a lock of malloc or of the interpreter. The runtime opens the page; the access is
// then repeated.
//
// Where queued copies still need a part of the page, the processor stops behind the one instruction that is repeated
// (the trap flag of x86), and the page is guarded again. On other processors it stays open.
thread_local std::vector<int64_t> opened;  // addresses in pages that are to be guarded again

void stop_behind_next_instruction(void* context, bool stops) {
#if defined(__x86_64__)
  constexpr greg_t TRAP_FLAG = 0x100;
  auto& flags = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL];
  flags = stops ? flags | TRAP_FLAG : flags & ~TRAP_FLAG;
#endif
}

void on_fault(int signal_number, siginfo_t* fault, void* context) {
  if (is_pinned(fault->si_addr)) {
    if (ask<bool>("touched", number(fault->si_addr))) {
      opened.push_back(number(fault->si_addr));
      stop_behind_next_instruction(context, true);
    }
    return;
  }
  sigaction(signal_number, &segv_before, nullptr);  // not ours: the repeated access meets who was there before
}

void on_stop(int signal_number, siginfo_t*, void* context) {
  if (opened.empty()) {
    sigaction(signal_number, &trap_before, nullptr);
    raise(signal_number);
    return;
  }
  stop_behind_next_instruction(context, false);
  for (int64_t address : std::exchange(opened, {})) ask<void>("guard_again", address);
}

void watch_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv_before);
#if defined(__x86_64__)
  action.sa_sigaction = on_stop;
  sigaction(SIGTRAP, &action, &trap_before);
#endif
}

struct Numbers final : at::CPUGeneratorImpl {
  explicit Numbers(int8_t device) {
    device_ = c10::Device(KIND, device);
    key_set_ = KEYS;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, int8_t(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int8_t d = 0; d < num_devices; ++d) made.push_back(at::make_generator<Numbers>(d));
      return made;
    }();
    return all[device < 0 ? current_device : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Numbers>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

struct OnDevice {
  int8_t before = current_device;
  explicit OnDevice(std::optional<c10::Device> device) {
    if (device && device->index() >= 0) current_device = device->index();
  }
  ~OnDevice() { current_device = before; }
};

// Memory given back whole, or taken anew, as sharded training does; what was there is not kept.
void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  TORCH_CHECK(size == 0 || storage.nbytes() == 0, "emulated: a storage grows from 0 bytes and shrinks to 0 only");
  OnDevice on(storage.device());
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(device_memory.allocate(size));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

using Sizes = c10::IntArrayRef;
using Type = std::optional<at::ScalarType>;

at::ScalarType type_or_default(Type type) { return type.value_or(c10::get_default_dtype_as_scalartype()); }

at::Tensor empty(Sizes sizes, Type type, std::optional<at::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(sizes, &device_memory, KEYS, type_or_default(type), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Type type, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, KEYS, type_or_default(type));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& from) {
  return set_storage(tensor, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.itemsize();
  return set_storage(tensor, std::move(storage), 0, {count}, {1});
}

const at::Tensor& resize_(const at::Tensor& tensor, Sizes sizes, std::optional<at::MemoryFormat>) {
  int64_t size = tensor.itemsize() * c10::multiply_integers(sizes);
  if (int64_t(tensor.storage().nbytes()) < size) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), size);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor as_strided(const at::Tensor& tensor, Sizes sizes, Sizes strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}
at::Tensor view(const at::Tensor& tensor, Sizes sizes) { return at::native::view(tensor, sizes); }
at::Tensor reshape_alias(const at::Tensor& tensor, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(tensor, sizes, strides);
}
at::Tensor unfold(const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dimension, size, step);
}

// The same memory as a tensor of the CPU, which does not keep it alive.
at::Tensor as_cpu(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// First byte of the storage, first byte of the tensor, and the byte behind its last element.
std::tuple<int64_t, int64_t, int64_t> span(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  int64_t first = number(tensor.mutable_data_ptr());
  int64_t size = tensor.numel() ? (last + 1) * tensor.itemsize() : 0;
  return {number(tensor.storage().mutable_data()), first, first + size};
}

void install(py::object given_runtime, int given_devices) {
  runtime = given_runtime.release().ptr();
  num_devices = given_devices;
  c10::SetAllocator(KIND, &device_memory);
  at::setHostAllocator(KIND, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::impl::registerDeviceGuard(KIND, new Guard());
  watch_faults();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("resize_", resize_);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", install);
  module.def("as_cpu", as_cpu);
  module.def("span", span);
  module.def("guard_pages", guard_pages);
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int device) { current_device = device; });
  module.def("current_stream", [](int device) { return current_stream(device < 0 ? current_device : device); });
  module.def("default_generator",
             [](int device) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device); });
  bind_c10d(module);
}
