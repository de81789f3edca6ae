#include "memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace pretend {
namespace {

constexpr int kPoison = 0xFF;  // every floating-point dtype reads it as NaN
std::atomic<int64_t> live{0}, peak{0};

struct Block {
  void* data;
  size_t bytes;
  Uses uses;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  freed(block->uses);
  std::memset(block->data, kPoison, block->bytes);
  std::free(block->data);
  live -= static_cast<int64_t>(block->bytes);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return take(bytes, c10::Device(kDevice, current_device())); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator the_allocator;

}  // namespace

c10::Allocator* allocator() { return &the_allocator; }

c10::DataPtr take(size_t bytes, c10::Device device) {
  check_own_device("allocation");
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 64)) == 0, "no memory");
  std::memset(data, kPoison, bytes);
  const int64_t now = (live += static_cast<int64_t>(bytes));
  int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  auto* block = new Block{data, bytes, {}};
  block->uses.home = key_of(device.index(), stream_id(device.index()));
  allocated(block->uses, static_cast<int64_t>(bytes));
  return c10::DataPtr(data, block, &free_block, device);
}

Uses* uses_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return uses_of(tensor.storage().data_ptr());
}

Uses* uses_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? &static_cast<Block*>(data.get_context())->uses : nullptr;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto fresh = take(bytes, impl->device());
  if (bytes && impl->nbytes()) std::memcpy(fresh.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

std::pair<int64_t, int64_t> memory_now_and_peak() { return {live.load(), peak.load()}; }
void reset_peak() { peak = live.load(); }

}  // namespace pretend
