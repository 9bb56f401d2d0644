// A backend of torch.distributed and its works, every method of which is a Python object's (../nccl.py).
//
// Python cannot subclass Backend itself, and a Work of Python loses is_completed on its way through torch.

#include "extension.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// A Python object that C++ may drop in any thread, also while the interpreter ends.
class Held {
 public:
  explicit Held(py::object given) : object_(std::move(given)) {}
  ~Held() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  template <class Result, class... Arguments>
  Result ask(const char* name, Arguments&&... arguments) const {
    py::gil_scoped_acquire gil;
    py::object answer = object_.attr(name)(std::forward<Arguments>(arguments)...);
    if constexpr (!std::is_void_v<Result>) return answer.cast<Result>();
  }

 private:
  py::object object_;
};

class Work final : public c10d::Work {
 public:
  explicit Work(py::object given) : held_(std::move(given)) {}
  bool isCompleted() override { return held_.ask<bool>("is_completed"); }
  bool isSuccess() const override { return held_.ask<bool>("is_success"); }
  bool wait(std::chrono::milliseconds limit) override {
    std::optional<double> limit_s;
    if (limit != kNoTimeout) limit_s = double(limit.count()) / 1000.0;
    held_.ask<void>("wait", limit_s);
    return true;
  }
  void synchronize() override { held_.ask<void>("wait"); }
  Tensors result() override { return held_.ask<Tensors>("result"); }

 private:
  Held held_;
};

class Backend final : public c10d::Backend {
 public:
  Backend(py::object given, int rank, int num_ranks) : c10d::Backend(rank, num_ranks), held_(std::move(given)) {}

  const std::string getBackendName() const override { return "emunccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { held_.ask<void>("start_coalescing"); }
  WorkPointer endCoalescing() override { return post("end_coalescing"); }

  WorkPointer send(Tensors& tensors, int to, int tag) override { return post("send", tensors, to, tag); }
  WorkPointer recv(Tensors& tensors, int source, int tag) override { return post("recv", tensors, source, tag); }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return post("broadcast", tensors, options.rootRank);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return post("all_reduce", tensors, int(options.reduceOp.op_));
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return post("all_gather", outputs[0], inputs[0]);
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return post("all_gather_into_tensor", output, input);
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    return post("reduce_scatter_tensor", output, input, int(options.reduceOp.op_));
  }
  WorkPointer barrier(const c10d::BarrierOptions&) override { return post("barrier"); }

  void abort() override { held_.ask<void>("abort"); }
  void shutdown() override { held_.ask<void>("shutdown"); }

 private:
  template <class... Arguments>
  WorkPointer post(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    return c10::make_intrusive<Work>(held_.ask<py::object>(name, std::forward<Arguments>(arguments)...));
  }
  Held held_;
};

}  // namespace

void bind_c10d(py::module_& module) {
  module.def("make_backend", [](py::object given, int rank, int num_ranks) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Backend>(std::move(given), rank, num_ranks);
  });
}
