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

void reads(const at::Tensor& tensor, StreamKey stream, const char* what) {
  auto* uses = uses_of(tensor);
  if (uses == nullptr) return;
  std::lock_guard lock(mutex);
  auto& clock = clocks[stream];
  if (!knows(clock, stream, uses->writer, uses->written)) {
    violate(std::string(what) + " on " + named(stream) + " reads what " + named(uses->writer) + " writes, without waiting for it");
    uses->written = 0;  // said once
  }
  uses->readers[stream] = clock[stream];
}

void writes(const at::Tensor& tensor, StreamKey stream, const char* what) {
  auto* uses = uses_of(tensor);
  if (uses == nullptr) return;
  std::lock_guard lock(mutex);
  auto& clock = clocks[stream];
  if (!knows(clock, stream, uses->writer, uses->written))
    violate(std::string(what) + " on " + named(stream) + " writes over what " + named(uses->writer) + " writes, without waiting for it");
  for (const auto& [reader, tick] : uses->readers)
    if (!knows(clock, stream, reader, tick))
      violate(std::string(what) + " on " + named(stream) + " writes over what " + named(reader) + " reads, without waiting for it");
  uses->readers.clear();
  uses->writer = stream;
  uses->written = clock[stream];
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

void record_stream(const at::Tensor& tensor, StreamKey stream) {
  if (auto* uses = uses_of(tensor)) {
    std::lock_guard lock(mutex);
    uses->recorded.insert(stream);
  }
}

void freed(const Uses& uses) {
  std::lock_guard lock(mutex);
  auto& left = unfinished[uses.home];
  auto add = [&](StreamKey stream, int64_t tick) {
    if (stream != uses.home && tick != 0 && !uses.recorded.count(stream)) left[stream] = std::max(left[stream], tick);
  };
  add(uses.writer, uses.written);
  for (const auto& [reader, tick] : uses.readers) add(reader, tick);
}

void allocated(Uses& uses) {
  std::lock_guard lock(mutex);
  auto& left = unfinished[uses.home];
  auto& clock = clocks[uses.home];
  std::erase_if(left, [&](const auto& use) {
    return knows(clock, uses.home, use.first, use.second) || knows(host, uses.home, use.first, use.second);
  });
  uses.readers.insert(left.begin(), left.end());
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
