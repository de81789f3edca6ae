// A pretend CUDA device for the CPU build of torch: tensors whose device is "cuda" and whose memory is the host's. Operators run
// on the CPU, on tensors that share the memory. What mixes devices is refused, what waits for the device is noted.
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "pretend.h"

extern "C" bool pretend_is_pinned(const void* address);  // of hooks.cpp

namespace pretend {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local DeviceIndex current = 0;
std::atomic<bool> logging{false};
std::atomic<int> own_device{-1};
py::object* on_note = nullptr;  // leaked: autograd's threads may outlive Python's objects
py::object* on_violation = nullptr;

DeviceIndex index_of(Device device) { return device.index() < 0 ? current : device.index(); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    Device old(kDevice, current);
    uncheckedSetDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(kDevice, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device d) const override { return make(index_of(d), stream_id(index_of(d))); }
  Stream getDefaultStream(Device d) const override { return make(index_of(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override { return make(index_of(d), new_stream()); }
  Stream exchangeStream(Stream stream) const override {
    auto old = getStream(stream.device());
    set_stream_id(stream.device_index(), stream.id());
    return old;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Clock*>(*event);
    *event = new Clock(recorded(key(stream)));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) stream_waits(key(stream), *static_cast<Clock*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { host_waits(recorded(key(stream))); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits(*static_cast<Clock*>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(uses_of(data), key(stream));
  }

 private:
  static Stream make(DeviceIndex index, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(kDevice, index), id); }
  static StreamKey key(const Stream& stream) { return key_of(stream.device_index(), stream.id()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// What an operator has made on the CPU, in memory of the device.
Tensor on_device(const Tensor& made, Device device) {
  if (!made.defined()) return made;
  auto dense = made.is_contiguous() || made.is_non_overlapping_and_dense() ? made : made.contiguous();
  const size_t bytes = dense.numel() * dense.itemsize();
  auto data = take(bytes, device);
  if (bytes)
    std::memcpy(data.get(), static_cast<const char*>(dense.storage().data()) + dense.storage_offset() * dense.itemsize(), bytes);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), allocator(), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), dense.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(dense.sizes(), dense.strides());
  return result;
}

// Operators whose result, or the size of whose result, the host must know.
const std::unordered_set<std::string> kWaits = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::equal", "aten::unique_dim",
    "aten::_unique2", "aten::_unique", "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount"};
// Operators that take indices on the CPU, and copy them.
const std::unordered_set<std::string> kTakesHostIndices = {"aten::index.Tensor", "aten::_index_put_impl_", "aten::index_put_"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  check_own_device(name.c_str());
  const StreamKey on = current_stream();
  begin_work(on);
  std::vector<std::pair<Tensor, Tensor>> pairs;  // the view on the host, the tensor
  std::optional<Device> device;
  bool host = false;
  auto swap = [&](const Tensor& tensor, bool written) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host = host || tensor.dim() > 0;
      return tensor;
    }
    if (device && device->index() != tensor.device().index())
      TORCH_CHECK(false, "Expected all tensors to be on the same device, ", name, ": ", *device, " and ", tensor.device());
    device = tensor.device();
    written ? writes(tensor, on, name.c_str()) : reads(tensor, on, name.c_str());
    // an empty `out=` may grow
    auto view = tensor.numel() ? host_view(tensor) : at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
    pairs.emplace_back(view, tensor);
    return view;
  };
  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      value = swap(value.toTensor(), written);
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(swap(tensor, written));
      value = c10::IValue(made);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        made.push_back(tensor ? std::optional<Tensor>(swap(*tensor, written)) : std::nullopt);
      value = c10::IValue(made);
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda()) device = value.toDevice();
      value = c10::IValue(Device(c10::kCPU));
    }
  }
  TORCH_CHECK(
      !host || kTakesHostIndices.count(name), "Expected all tensors to be on the same device: ", name,
      " was given some on the CPU and some on cuda");
  if (host) note("h2d", name + " with indices on the host");
  if (kWaits.count(name)) {
    note("wait", name);
    host_waits(recorded(on));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (device && device->index() < 0) device = Device(kDevice, current);
  const Device to = device ? *device : Device(kDevice, current);
  auto back = [&](const Tensor& made) -> Tensor {
    if (!made.defined()) return made;
    for (auto& [view, original] : pairs)
      if (view.is_same(made)) {
        if (view.sizes() != original.sizes()) {  // an `out=` that was made larger
          auto fresh = on_device(view, to);
          original.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
          original.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
        }
        return original;
      }
    for (auto& [view, original] : pairs)
      if (made.has_storage() && made.numel() && made.storage().data() == view.storage().data() && view.storage().nbytes())
        return at::native::as_strided_tensorimpl(original, made.sizes(), made.strides(), made.storage_offset());
    auto result = on_device(made, to);
    writes(result, on, name.c_str());
    return result;
  };
  const size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(back(tensor));
      value = c10::IValue(made);
    }
  }
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->index() >= 0 ? *device : Device(kDevice, current));
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->index() >= 0 ? *device : Device(kDevice, current));
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty()) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source) {
  const int64_t length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  const StreamKey on = current_stream();
  begin_work(on);
  reads(source, on, "copy");
  writes(self, on, "copy");
  auto to = host_view(self), from = host_view(source);
  if (self.is_cuda() == source.is_cuda()) {
    TORCH_CHECK(self.device() == source.device(), "copy between ", source.device(), " and ", self.device());
    to.copy_(from);
    return self;
  }
  // The host goes on before the copy has ended where its memory is pinned and the caller asks for that; else it waits, for the
  // work before on this stream too.
  const auto& on_host = self.is_cuda() ? source : self;
  const bool pinned = on_host.numel() && pretend_is_pinned(on_host.const_data_ptr());
  const bool beside = non_blocking && pinned && on_host.is_contiguous();
  const std::string text = (self.is_cuda() ? "copy to the device of " : "copy to the host of ") +
      std::to_string(source.numel() * source.itemsize()) + " bytes";
  note(beside ? (self.is_cuda() ? "h2d" : "d2h") : pinned ? "wait" : "pageable", text);
  if (beside && !self.is_cuda()) {
    copy_when_waited(self, from.to(self.scalar_type()).contiguous().clone(), on);
    return self;
  }
  if (!beside) host_waits(recorded(on));
  to.copy_(from);
  if (beside) travels(source, on);
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("copy_", &copy);
}

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

}  // namespace

int device_count() {
  const char* count = std::getenv("PRETEND_CUDA_DEVICES");
  return count ? std::atoi(count) : 1;
}

DeviceIndex current_device() { return current; }
void set_current_device(DeviceIndex index) { current = index; }

void violate(const std::string& text) {
  if (on_violation == nullptr) return;
  py::gil_scoped_acquire gil;
  (*on_violation)(text);
}

void note(const char* kind, const std::string& what) {
  if (!logging || on_note == nullptr) return;
  py::gil_scoped_acquire gil;
  (*on_note)(kind, what);
}

void check_own_device(const char* what) {
  const int own = own_device;
  if (own >= 0 && current != own)
    violate(std::string(what) + " on cuda:" + std::to_string(current) + " by a rank of cuda:" + std::to_string(own));
}

Tensor host_view(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  auto* kept = new c10::Storage(storage);
  c10::DataPtr data(storage.mutable_data_ptr().get(), kept, &drop_storage, Device(c10::kCPU));
  c10::Storage view(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(view), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  bind_collectives(&m);
  py::class_<Clock>(m, "Clock");
  m.def("violate", &violate);
  m.def("on_note", [](py::object f) { on_note = new py::object(std::move(f)); });
  m.def("on_violation", [](py::object f) { on_violation = new py::object(std::move(f)); });
  m.def("log", [](bool on) { logging = on; });
  m.def("bind", [](int device) { own_device = device; });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("device_count", &device_count);
  m.def("resize_storage", [](c10::Storage storage, size_t bytes) { resize_storage(storage, bytes); });
  m.def("memory", &memory_now_and_peak);
  m.def("reset_peak", &reset_peak);
  m.def("host_view", &host_view);
  m.def("kernel", [](const std::string& name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
    begin_work(current_stream());
    for (const auto& tensor : read) reads(tensor, current_stream(), name.c_str());
    for (const auto& tensor : written) writes(tensor, current_stream(), name.c_str());
  });
  m.def("from_host", [](const at::Tensor& made, c10::Device device, const std::string& name) {
    auto result = on_device(made, device);
    writes(result, current_stream(), name.c_str());
    return result;
  });
  m.def("key_of", [](int device, int64_t id) { return key_of(static_cast<c10::DeviceIndex>(device), id); });
  m.def("stream_id", [](int device) { return stream_id(static_cast<c10::DeviceIndex>(device)); });
  m.def("set_stream_id", [](int device, int64_t id) { set_stream_id(static_cast<c10::DeviceIndex>(device), id); });
  m.def("new_stream", &new_stream);
  m.def("recorded", &recorded);
  m.def("stream_waits", &stream_waits);
  m.def("host_waits", &host_waits);
  m.def("host_knows", &host_knows);
  m.def("leaves_work", &leaves_work);
  m.def("record_stream", [](const at::Tensor& tensor, StreamKey stream) { record_stream(uses_of(tensor), stream); });
  m.def("all_streams", &all_streams);
  m.def("note_wait", [](const std::string& what) { note("wait", what); });
  m.def("note_late", [](const std::string& what) { note("late", what); });
}
