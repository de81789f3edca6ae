// Loaded before torch: says that there is a CUDA device, and knows which memory of the host is pinned.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <map>
#include <mutex>

using c10::DeviceIndex;
namespace {

std::mutex mutex;
auto* pinned = new std::map<uintptr_t, size_t>;  // first address -> bytes; leaked: tensors may outlive it

}  // namespace

extern "C" void pretend_pin(const void* address, size_t bytes) {
  std::lock_guard lock(mutex);
  (*pinned)[reinterpret_cast<uintptr_t>(address)] = std::max<size_t>(bytes, 1);
}

extern "C" bool pretend_unpin(const void* address) {
  std::lock_guard lock(mutex);
  return pinned->erase(reinterpret_cast<uintptr_t>(address)) > 0;
}

extern "C" bool pretend_is_pinned(const void* address) {
  std::lock_guard lock(mutex);
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto after = pinned->upper_bound(at);
  return after != pinned->begin() && at < std::prev(after)->first + std::prev(after)->second;
}

namespace {

void free_pinned(void* data) {
  pretend_unpin(data);
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 64)) == 0, "no memory");
    pretend_pin(data, bytes);
    return c10::DataPtr(data, data, &free_pinned, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator allocator;

int device_count() {
  const char* n = std::getenv("PRETEND_CUDA_DEVICES");
  return n ? std::atoi(n) : 1;
}
thread_local DeviceIndex current = 0;
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current;
    current = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* address) const override { return pretend_is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &allocator; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace
