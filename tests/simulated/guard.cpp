// Give the device type "cuda" of a CPU wheel a device guard, hooks, generators and pinned memory.
// All but the memory is asked of Python: three integers go in, one comes out, FAILED with a text for an error.
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <string>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int64_t FAILED = std::numeric_limits<int64_t>::min();

using Call = int64_t (*)(int64_t, int64_t, int64_t);
struct Calls {
  Call get_device, set_device, get_stream, exchange_stream, new_stream, count;
  Call record, block, query, destroy, elapsed, synchronize_event;
  Call synchronize_stream, synchronize_device, query_stream, capturing;
};
Calls calls;
thread_local std::string error;

int64_t ask(Call call, int64_t a = 0, int64_t b = 0, int64_t c = 0) {
  int64_t answer = call(a, b, c);
  TORCH_CHECK(answer != FAILED, error);
  return answer;
}

DeviceIndex index_of(Device d) { return d.has_index() ? d.index() : ask(calls.get_device); }
int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }
Stream stream(Device d, int64_t id) { return Stream(Stream::UNSAFE, Device(CUDA, index_of(d)), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return calls.count(0, 0, 0); }
  Device getDevice() const override { return Device(CUDA, ask(calls.get_device)); }
  void setDevice(Device d) const override {
    if (d.has_index()) ask(calls.set_device, d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) calls.set_device(d.index(), 0, 0);
  }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  Stream getStream(Device d) const override { return stream(d, ask(calls.get_stream, index_of(d))); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int = 0) const override { return stream(d, ask(calls.new_stream, index_of(d))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), ask(calls.exchange_stream, s.device_index(), s.id()));
  }
  bool queryStream(const Stream& s) const override { return ask(calls.query_stream, s.device_index(), s.id()); }
  bool isStreamCapturing(const Stream& s) const {  // which not every version has
    return ask(calls.capturing, s.device_index(), s.id());
  }
  void synchronizeStream(const Stream& s) const override {
    ask(calls.synchronize_stream, s.device_index(), s.id());
  }
  void synchronizeDevice(const DeviceIndex d) const override { ask(calls.synchronize_device, d); }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    *e = reinterpret_cast<void*>(ask(calls.record, number(*e), s.device_index(), s.id()));
  }
  void block(void* e, const Stream& s) const override {
    if (e) ask(calls.block, number(e), s.device_index(), s.id());
  }
  bool queryEvent(void* e) const override { return !e || ask(calls.query, number(e)); }
  void synchronizeEvent(void* e) const override {
    if (e) ask(calls.synchronize_event, number(e));
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override {
    if (e) calls.destroy(number(e), 0, 0);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return ask(calls.elapsed, number(from), number(to)) / 1e6;  // from nanoseconds
  }
};

// A generator is a seed and the number of the next draw, as that of a GPU is.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex i) : GeneratorImpl(Device(CUDA, i), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  uint64_t held[2] = {c10::default_rng_seed_val, 0};
  void set_current_seed(uint64_t seed) override { held[0] = seed, held[1] = 0; }
  uint64_t current_seed() const override { return held[0]; }
  void set_offset(uint64_t offset) override { held[1] = offset; }
  uint64_t get_offset() const override { return held[1]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return held[0];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({sizeof held}, at::TensorOptions(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), held, sizeof held);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof held && state.is_cpu(), "RNG state is of another device");
    std::memcpy(held, state.data(), sizeof held);
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    std::memcpy(copy->held, held, sizeof held);
    return copy;
  }
};

// Pinned memory is that of the host, at addresses that are known, each with a number of its own.
struct Piece {
  size_t size;
  int64_t number;
};
std::mutex pinned_lock;
std::map<uintptr_t, Piece> pinned;
int64_t pieces = 0;

int64_t number_of(const void* p) {
  auto address = reinterpret_cast<uintptr_t>(p);
  std::lock_guard<std::mutex> held(pinned_lock);
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin() || address - std::prev(next)->first >= std::prev(next)->second.size) return 0;
  return std::prev(next)->second.number;
}

struct Pinned final : c10::Allocator {
  static void release(void* p) {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(reinterpret_cast<uintptr_t>(p));
    std::free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = std::aligned_alloc(64, (n + 64) / 64 * 64);
    std::memset(p, 0xFF, n);
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned[reinterpret_cast<uintptr_t>(p)] = {n, ++pieces};
    return {p, p, &release, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
Pinned pinned_allocator;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return ask(calls.count); }
  DeviceIndex current_device() const override { return ask(calls.get_device); }
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, current_device()); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* p) const override { return number_of(p); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? current_device() : i);
  }
};

Guard guard;
std::mutex freed_lock;
std::deque<void*> freed;

}  // namespace

extern "C" int install(const Calls* functions) {
  calls = *functions;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
  // Imports may have asked for the hooks, which torch keeps from then on. They have no members: change their class.
  static Hooks hooks{{}};
  static_assert(sizeof(Hooks) == sizeof(void*));
  auto& known = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&known), static_cast<void*>(&hooks), sizeof(void*));
  return at::detail::getCUDAHooks().hasCUDA();
}

extern "C" void set_error(const char* text) { error = text; }

// The number of a piece of pinned memory, or 0.
extern "C" int64_t pinned_number(const void* p) { return number_of(p); }

// Exchange the memory of two storages.
extern "C" void exchange_memory(c10::StorageImpl* one, c10::StorageImpl* other) {
  auto size = one->nbytes();
  std::swap(one->_mutable_data_ptr_no_checks(), other->_mutable_data_ptr_no_checks());
  one->set_nbytes(other->nbytes());
  other->set_nbytes(size);
}

// Storages may be freed while an error of Python is set, when no Python may run: note their addresses.
extern "C" void note_freed(void* block) {
  std::lock_guard<std::mutex> held(freed_lock);
  freed.push_back(block);
}

extern "C" void* take_freed() {
  std::lock_guard<std::mutex> held(freed_lock);
  if (freed.empty()) return nullptr;
  void* block = freed.front();
  freed.pop_front();
  return block;
}
