// Collectives that complete as late as they may: an output is poison until `wait()`, and what is sent must not change before.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "pretend.h"

namespace pretend {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
template <class T>
using P = c10::intrusive_ptr<T>;
using Tensors = std::vector<Tensor>;

bool poisoned(const Tensor& t) {
  auto c = t.contiguous();
  const auto* p = static_cast<const unsigned char*>(c.const_data_ptr());
  for (size_t i = 0; i < c.nbytes(); i++)
    if (p[i] != 0xFF) return false;
  return true;
}

void poison(Tensor t) {
  if (t.is_contiguous()) {
    std::memset(t.mutable_data_ptr(), 0xFF, t.nbytes());
  } else {
    auto c = at::empty_like(t, at::MemoryFormat::Contiguous);
    std::memset(c.mutable_data_ptr(), 0xFF, c.nbytes());
    t.copy_(c);
  }
}

struct LateWork final : Work {
  LateWork(std::string name, P<Work> inner, Tensors outputs, Tensors made, Tensors inputs, Tensors sent, Tensors user, Clock end)
      : Work(0, c10d::OpType::UNKNOWN), name_(std::move(name)), inner_(std::move(inner)), outputs_(std::move(outputs)),
        made_(std::move(made)), inputs_(std::move(inputs)), sent_(std::move(sent)), user_(std::move(user)), end_(std::move(end)) {
    for (const auto& t : user_) versions_.push_back(t.is_inference() ? 0 : t._version());
  }

  ~LateWork() override {
    if (!done_ && inner_) {
      note("never waited", name_);
      try {
        inner_->wait();
      } catch (...) {
      }
    }
  }
  bool isCompleted() override {
    if (done_) return true;
    if (!inner_->isCompleted()) return false;
    end();
    return true;
  }
  bool isSuccess() const override { return done_ && inner_->isSuccess(); }
  // The current stream waits for the collective; the host does not, as with NCCL.
  bool wait(std::chrono::milliseconds timeout) override {
    if (!done_) {
      inner_->wait(timeout);
      end();
    }
    stream_waits(current_stream(), end_);
    user_.clear();  // NCCL's work keeps its tensors until it is waited for
    inputs_.clear();
    outputs_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return user_; }

 private:
  void end() {
    for (size_t i = 0; i < user_.size(); i++)
      if (!user_[i].is_inference() && user_[i]._version() != versions_[i]) violate(name_ + ": a tensor was changed in place before wait()");
    for (size_t i = 0; i < inputs_.size(); i++) {
      auto now = inputs_[i].contiguous();
      if (std::memcmp(now.const_data_ptr(), sent_[i].const_data_ptr(), now.nbytes()) != 0)
        violate(name_ + ": an input was written to before wait()");
    }
    for (size_t i = 0; i < outputs_.size(); i++) {
      if (outputs_[i].numel() && !poisoned(outputs_[i])) violate(name_ + ": an output was written to before wait()");
      outputs_[i].copy_(made_[i]);
    }
    done_ = true;
  }

  std::string name_;
  P<Work> inner_;
  Tensors outputs_, made_, inputs_, sent_, user_;
  std::vector<int64_t> versions_;
  Clock end_;  // of the collective, on the stream of its group
  bool done_ = false;
};

Tensors host_views(const Tensors& ts) {
  Tensors found;
  for (const auto& t : ts) found.push_back(host_view(t).detach());
  return found;
}
Tensors shadows(const Tensors& ts) {
  Tensors found;
  for (const auto& t : ts) found.push_back(t.clone(at::MemoryFormat::Contiguous));
  return found;
}

struct LateOptions final : Backend::Options {
  LateOptions() : Backend::Options("nccl") {}
};

struct Late final : Backend {
  explicit Late(P<Backend> inner) : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }
  P<Options> getBackendOptions() override { return c10::make_intrusive<LateOptions>(); }
  bool supportsSplitting() const override { return true; }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds t) override { inner_->setTimeout(t); }
  P<Backend> split(const P<c10d::Store>& store, const std::vector<int>& ranks, const P<Options>& opts) override {
    auto own = c10::make_intrusive<c10d::PrefixStore>("late", store);
    auto made = inner_->split(own, ranks, opts);
    return made ? P<Backend>(c10::make_intrusive<Late>(made)) : P<Backend>();
  }

  // Begins a collective on the stream of this group, after the work that is queued on the current stream.
  Clock begin(const char* name, const Tensors& read, const Tensors& written) {
    check_own_device(name);
    begin_work(current_stream());
    stream_waits(stream_, recorded(current_stream()));
    begin_work(stream_);
    for (const auto& tensor : read) reads(tensor, stream_, name);
    for (const auto& tensor : written) writes(tensor, stream_, name);
    return recorded(stream_);
  }

  // in place: `ts` are sent and overwritten
  template <class F>
  P<Work> in_place(const char* name, Tensors& ts, F&& start) {
    auto end = begin(name, ts, ts);
    auto as = host_views(ts);
    auto made = shadows(as);
    for (auto& a : as) poison(a);
    auto work = start(made);
    return c10::make_intrusive<LateWork>(name, work, as, made, Tensors{}, Tensors{}, ts, std::move(end));
  }
  // from `in` to `out`
  template <class F>
  P<Work> moved(const char* name, const Tensors& out, const Tensors& in, F&& start) {
    auto end = begin(name, in, out);
    auto ins = host_views(in), outs = host_views(out);
    auto sent = shadows(ins);
    auto keep = shadows(ins);
    Tensors made;
    for (auto& o : outs) made.push_back(at::empty_like(o, at::MemoryFormat::Contiguous));
    // where an input is part of an output (all-gather in place), only its copy counts
    Tensors checked, right;
    for (size_t i = 0; i < ins.size(); i++) {
      bool inside = false;
      for (auto& o : outs) inside = inside || (o.storage().data() == ins[i].storage().data());
      if (!inside) {
        checked.push_back(ins[i]);
        right.push_back(keep[i]);
      }
    }
    for (auto& o : outs) poison(o);
    auto work = start(made, sent);
    return c10::make_intrusive<LateWork>(name, work, outs, made, checked, right, out, std::move(end));
  }

  P<Work> broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    if (o.rootRank == getRank()) return sent_only("broadcast", ts, [&](Tensors& m) { return inner_->broadcast(m, o); });
    return in_place("broadcast", ts, [&](Tensors& m) { return inner_->broadcast(m, o); });
  }
  P<Work> allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
    return in_place("allreduce", ts, [&](Tensors& m) { return inner_->allreduce(m, o); });
  }
  P<Work> allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override {
    return in_place("allreduce_coalesced", ts, [&](Tensors& m) { return inner_->allreduce_coalesced(m, o); });
  }
  P<Work> reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    return in_place("reduce", ts, [&](Tensors& m) { return inner_->reduce(m, o); });
  }
  P<Work> allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return moved("allgather", out[0], in, [&](Tensors& m, Tensors& s) {
      std::vector<Tensors> lists{m};
      return inner_->allgather(lists, s, o);
    });
  }
  P<Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return moved("_allgather_base", {out}, {in}, [&](Tensors& m, Tensors& s) { return inner_->_allgather_base(m[0], s[0], o); });
  }
  P<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return moved("allgather_into_tensor_coalesced", out, in, [&](Tensors& m, Tensors& s) {
      return inner_->allgather_into_tensor_coalesced(m, s, o);
    });
  }
  P<Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return moved(
        "_reduce_scatter_base", {out}, {in}, [&](Tensors& m, Tensors& s) { return inner_->_reduce_scatter_base(m[0], s[0], o); });
  }
  P<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return moved("reduce_scatter_tensor_coalesced", out, in, [&](Tensors& m, Tensors& s) {
      return inner_->reduce_scatter_tensor_coalesced(m, s, o);
    });
  }
  P<Work> alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
    return moved("alltoall_base", {out}, {in}, [&](Tensors& m, Tensors& s) {
      return inner_->alltoall_base(m[0], s[0], os, is, o);
    });
  }
  template <class F>
  P<Work> sent_only(const char* name, const Tensors& ts, F&& start) {
    auto end = begin(name, ts, {});
    auto as = host_views(ts);
    auto sent = shadows(as), keep = shadows(as);
    auto work = start(sent);
    return c10::make_intrusive<LateWork>(name, work, Tensors{}, sent, as, keep, ts, std::move(end));
  }
  P<Work> send(Tensors& ts, int to, int tag) override {
    return sent_only("send", ts, [&](Tensors& m) { return inner_->send(m, to, 0); });  // NCCL has no tags
  }
  P<Work> recv(Tensors& ts, int from, int tag) override {
    return in_place("recv", ts, [&](Tensors& m) { return inner_->recv(m, from, 0); });
  }
  P<Work> barrier(const c10d::BarrierOptions& o) override {
    c10d::BarrierOptions own;
    own.timeout = o.timeout;
    note("wait", "barrier");
    return inner_->barrier(own);
  }

 private:
  P<Backend> inner_;
  StreamKey stream_ = new_stream();  // NCCL runs the collectives of a group on a stream of their own
};

}  // namespace

void bind_collectives(void* module) {
  auto& m = *static_cast<py::module_*>(module);
  py::class_<LateOptions, P<LateOptions>, Backend::Options>(m, "LateOptions")
      .def("__deepcopy__", [](const LateOptions&, py::object) { return c10::make_intrusive<LateOptions>(); });
  py::class_<Late, P<Late>, Backend>(m, "Late").def_property_readonly(
      "options", [](Late&) { return c10::make_intrusive<LateOptions>(); });
  m.def("make_late", [](P<Backend> inner) -> P<Late> { return c10::make_intrusive<Late>(std::move(inner)); });
}

}  // namespace pretend
