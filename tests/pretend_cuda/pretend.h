// What the parts of the pretend device share.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace pretend {

constexpr auto kDevice = c10::DeviceType::CUDA;

int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// A breach of CUDA's rules, with the Python stack of the thread where there is one.
void violate(const std::string& text);
// Something that costs time on a GPU. kind: `wait` (the host waits for the device), `late` (it waits, but the device has more to
// do), `pageable` (it waits since the memory of a copy is not pinned), `h2d` and `d2h` (copies beside the host's work),
// `never waited` (a collective).
void note(const char* kind, const std::string& what);
// A rank may only use its own GPU: a context on another one takes hundreds of megabytes there.
void check_own_device(const char* what);

// The same memory as a tensor of the CPU.
at::Tensor host_view(const at::Tensor& tensor);

// Which work is known to run before which, by vector clocks: streams are threads, events are messages. A stream is named by a
// number; the host is one more thread.
using StreamKey = int64_t;
using Clock = std::map<StreamKey, int64_t>;

// One use of bytes [begin, end) of a block, and when it was on the clock of its stream.
struct Use {
  int64_t begin, end;
  StreamKey stream;
  int64_t tick;
  bool write;
};

// Who has used a block of memory. Bytes count, not blocks: a bucket of gradients may travel while backward writes the next one.
struct Uses {
  StreamKey home = 0;  // the stream on which the block was allocated, and on which its memory is used again
  std::vector<Use> uses;
  std::set<StreamKey> recorded;  // by record_stream
};

StreamKey key_of(c10::DeviceIndex device, c10::StreamId id);
StreamKey current_stream();
c10::StreamId stream_id(c10::DeviceIndex device);
void set_stream_id(c10::DeviceIndex device, c10::StreamId id);
c10::StreamId new_stream();

// One kernel or copy on `stream`, or on the current one. Then `reads` and `writes` say what it uses.
void begin_work(StreamKey stream);
void reads(const at::Tensor& tensor, StreamKey stream, const char* what);
void writes(const at::Tensor& tensor, StreamKey stream, const char* what);
Clock recorded(StreamKey stream);  // an event
Clock all_streams();               // the end of the work that is queued anywhere
void stream_waits(StreamKey stream, const Clock& event);
void host_waits(const Clock& event);
bool host_knows(const Clock& event);   // whether the host has waited for it
bool leaves_work(const Clock& event);  // whether work is queued that the event does not wait for, so that the device stays busy
void record_stream(Uses* uses, StreamKey stream);
// Freed memory is used again on its own stream at once, whatever other streams still do with it, unless `record_stream` has named
// them. Any later block of that stream may be the same memory, so it begins with these uses.
void freed(const Uses& uses);
void allocated(Uses& uses, int64_t bytes);
// A copy to the host that is done when the host has waited for it; until then the memory is poison.
void copy_when_waited(at::Tensor host, at::Tensor value, StreamKey stream);
// Memory of the host that a copy to the device still reads: it must not change before the host has waited.
void travels(at::Tensor host, StreamKey stream);

void bind_collectives(void* module);  // adds the late backend to the Python module

}  // namespace pretend
