// Streams and events: which work is ordered, and who uses memory without waiting for it.
#include <cstring>
#include <mutex>
#include <vector>

#include "memory.h"
#include "pretend.h"

namespace pretend {
namespace {

std::recursive_mutex mutex;
std::map<StreamKey, Clock> clocks;
Clock host;
std::map<StreamKey, Clock> unfinished;  // by the stream of freed memory: what other streams may still do with it
thread_local std::map<c10::DeviceIndex, c10::StreamId> current;
std::atomic<int64_t> next_stream{8};

struct HostCopy {
  at::Tensor host, value;
  StreamKey stream;
  int64_t tick;
  bool to_host;
};
std::vector<HostCopy>* copies = new std::vector<HostCopy>;  // leaked: tensors must not be freed after Python has ended

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, tick] : other) {
    auto& held = into[stream];
    held = std::max(held, tick);
  }
}

std::string named(StreamKey stream) {
  return stream < 0 ? "the default stream of cuda:" + std::to_string(-stream - 1) : "stream " + std::to_string(stream);
}

bool knows(const Clock& clock, StreamKey self, StreamKey other, int64_t tick) {
  if (self == other || tick == 0) return true;
  auto found = clock.find(other);
  return found != clock.end() && found->second >= tick;
}

// The bytes of the block between the first and the last element. Two views with strides may share a range and no byte.
std::pair<int64_t, int64_t> bytes_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const int64_t first = tensor.storage_offset();
  return {first * tensor.itemsize(), (first + last + 1) * tensor.itemsize()};
}

bool covered(const HostCopy& copy) {
  auto found = host.find(copy.stream);
  return found != host.end() && found->second >= copy.tick;
}

}  // namespace

StreamKey key_of(c10::DeviceIndex device, c10::StreamId id) { return id == 0 ? -(static_cast<int64_t>(device) + 1) : id; }
c10::StreamId stream_id(c10::DeviceIndex device) { return current[device]; }
void set_stream_id(c10::DeviceIndex device, c10::StreamId id) { current[device] = id; }
c10::StreamId new_stream() { return next_stream++; }
StreamKey current_stream() { return key_of(current_device(), current[current_device()]); }

void begin_work(StreamKey stream) {
  std::lock_guard lock(mutex);
  auto& clock = clocks[stream];
  merge(clock, host);  // what the host has waited for is done before it issues this
  clock[stream]++;
}

// Says what is wrong when nothing is locked any more: a stack needs Python's lock, whose holder may want ours.
struct Found {
  std::vector<std::string> texts;
  void add(const char* what, StreamKey stream, const char* does, const Use& other) {
    texts.push_back(
        std::string(what) + " on " + named(stream) + does + named(other.stream) + (other.write ? " writes" : " reads") +
        ", without waiting for it");
  }
  ~Found() {
    for (const auto& text : texts) violate(text);
  }
};

void reads(const at::Tensor& tensor, StreamKey stream, const char* what) {
  auto* uses = uses_of(tensor);
  if (uses == nullptr || tensor.numel() == 0) return;
  const auto [begin, end] = bytes_of(tensor);
  Found found;
  std::lock_guard lock(mutex);
  auto& clock = clocks[stream];
  for (auto& use : uses->uses)
    if (use.write && use.begin < end && begin < use.end && !knows(clock, stream, use.stream, use.tick)) {
      found.add(what, stream, " reads what ", use);
      use.tick = 0;  // said once
    }
  std::erase_if(uses->uses, [&, begin = begin, end = end](const Use& use) {
    return !use.write && use.stream == stream && begin <= use.begin && use.end <= end;
  });
  uses->uses.push_back({begin, end, stream, clock[stream], false});
}

void writes(const at::Tensor& tensor, StreamKey stream, const char* what) {
  auto* uses = uses_of(tensor);
  if (uses == nullptr || tensor.numel() == 0) return;
  const auto [begin, end] = bytes_of(tensor);
  Found found;
  std::lock_guard lock(mutex);
  auto& clock = clocks[stream];
  for (const auto& use : uses->uses)
    if (use.begin < end && begin < use.end && !knows(clock, stream, use.stream, use.tick))
      found.add(what, stream, " writes over what ", use);
  std::erase_if(uses->uses, [&, begin = begin, end = end](const Use& use) { return begin <= use.begin && use.end <= end; });
  uses->uses.push_back({begin, end, stream, clock[stream], true});
}

Clock recorded(StreamKey stream) {
  std::lock_guard lock(mutex);
  return clocks[stream];
}

Clock all_streams() {
  std::lock_guard lock(mutex);
  Clock all;
  for (const auto& [stream, clock] : clocks) merge(all, clock);
  return all;
}

void stream_waits(StreamKey stream, const Clock& event) {
  std::lock_guard lock(mutex);
  merge(clocks[stream], event);
}

void host_waits(const Clock& event) {
  std::vector<HostCopy> done;
  {
    std::lock_guard lock(mutex);
    merge(host, event);
    for (size_t i = 0; i < copies->size();)
      if (covered((*copies)[i])) {
        done.push_back(std::move((*copies)[i]));
        copies->erase(copies->begin() + i);
      } else {
        i++;
      }
  }
  for (auto& copy : done) {
    if (copy.to_host)
      std::memcpy(copy.host.mutable_data_ptr(), copy.value.const_data_ptr(), copy.value.nbytes());
    else if (std::memcmp(copy.host.const_data_ptr(), copy.value.const_data_ptr(), copy.value.nbytes()) != 0)
      violate("pinned memory was changed while a copy to the device still read it");
  }
}

bool host_knows(const Clock& event) {
  std::lock_guard lock(mutex);
  for (const auto& [stream, tick] : event) {
    const auto found = host.find(stream);
    if (found == host.end() || found->second < tick) return false;
  }
  return true;
}

bool leaves_work(const Clock& event) {
  std::lock_guard lock(mutex);
  for (const auto& [stream, clock] : clocks) {
    const auto now = clock.find(stream), then = event.find(stream);
    if (now != clock.end() && now->second > (then == event.end() ? 0 : then->second)) return true;
  }
  return false;
}

void record_stream(Uses* uses, StreamKey stream) {
  if (uses == nullptr) return;
  std::lock_guard lock(mutex);
  uses->recorded.insert(stream);
}

void freed(const Uses& uses) {
  std::lock_guard lock(mutex);
  auto& left = unfinished[uses.home];
  for (const auto& use : uses.uses)
    if (use.stream != uses.home && !uses.recorded.count(use.stream)) left[use.stream] = std::max(left[use.stream], use.tick);
}

void allocated(Uses& uses, int64_t bytes) {
  std::lock_guard lock(mutex);
  auto& left = unfinished[uses.home];
  auto& clock = clocks[uses.home];
  std::erase_if(left, [&](const auto& use) {
    return knows(clock, uses.home, use.first, use.second) || knows(host, uses.home, use.first, use.second);
  });
  for (const auto& [stream, tick] : left) uses.uses.push_back({0, bytes, stream, tick, false});
}

void copy_when_waited(at::Tensor host_tensor, at::Tensor value, StreamKey stream) {
  std::memset(host_tensor.mutable_data_ptr(), 0xFF, host_tensor.nbytes());
  std::lock_guard lock(mutex);
  copies->push_back({std::move(host_tensor), std::move(value), stream, clocks[stream][stream], true});
}

void travels(at::Tensor host_tensor, StreamKey stream) {
  auto value = host_tensor.clone();
  std::lock_guard lock(mutex);
  copies->push_back({std::move(host_tensor), std::move(value), stream, clocks[stream][stream], false});
}

}  // namespace pretend
