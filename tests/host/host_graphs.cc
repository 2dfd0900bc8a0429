// bindings/kept_graph.h, and what bindings/ffi_check.h makes of a failed launch, over a runtime that
// only writes down what it is asked for. A graph is the list of numbers that were launched while it was
// recorded: a kernel each, from 100 on one in clusters of two, below 0 none.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/ffi_check.h"
#include "bindings/kept_graph.h"

namespace py = pybind11;

namespace {

using Work = std::vector<int>;

struct FakeRuntime {
  std::vector<std::string> asked;  // for what
  std::set<std::string> refused;
  Work done, recorded;
  bool recording = false;
  cudaError_t last = cudaSuccess;

  cudaError_t answer(const std::string& what) {
    asked.push_back(what);
    if (refused.count(what) == 0) return cudaSuccess;
    return last = cudaErrorUnknown;
  }
};
FakeRuntime fake;

const auto kOwnStream = reinterpret_cast<cudaStream_t>(1);
const auto kStream = reinterpret_cast<cudaStream_t>(2);

Work* work(void* graph) { return static_cast<Work*>(graph); }

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(fake.last, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "why"; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  if (fake.refused.count("ask") != 0) return fake.answer("ask");
  *status = fake.refused.count("not recording") != 0 ? cudaStreamCaptureStatusActive
                                                     : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  const cudaError_t status =
      fake.refused.count("stream") != 0 ? fake.answer("stream") : cudaSuccess;
  if (status == cudaSuccess) *stream = kOwnStream;
  return status;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  fake.recorded.clear();
  const cudaError_t status = fake.answer("record");
  fake.recording = status == cudaSuccess;
  return status;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  fake.recording = false;
  *graph = nullptr;
  const cudaError_t status = fake.refused.count("end") != 0 ? fake.answer("end") : cudaSuccess;
  if (status == cudaSuccess) *graph = reinterpret_cast<cudaGraph_t>(new Work(fake.recorded));
  return status;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete work(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  *count = work(graph)->size();
  for (size_t i = 0; nodes != nullptr && i < *count; ++i) {
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(&work(graph)->at(i));
  }
  return fake.refused.count("count") != 0 ? fake.answer("count") : cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = *reinterpret_cast<int*>(node) < 0 ? cudaGraphNodeTypeMemset : cudaGraphNodeTypeKernel;
  return cudaSuccess;
}
cudaError_t cudaGraphKernelNodeGetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID,
                                            cudaLaunchAttributeValue* value) {
  const int number = *reinterpret_cast<int*>(node);
  if (number < 0 || fake.refused.count("attribute") != 0) return fake.answer("attribute");
  if (number >= 100) value->clusterDim = {2, 1, 1};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  const cudaError_t status = fake.answer("make");
  if (status == cudaSuccess) *exec = reinterpret_cast<cudaGraphExec_t>(new Work(*work(graph)));
  return status;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo*) {
  if (work(exec)->size() != work(graph)->size()) {
    return fake.last = cudaErrorGraphExecUpdateFailure;
  }
  const cudaError_t status = fake.answer("change");
  if (status == cudaSuccess) *work(exec) = *work(graph);
  return status;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  fake.asked.push_back("destroy");
  delete work(exec);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  const cudaError_t status = fake.answer("launch graph");
  fake.done.insert(fake.done.end(), work(exec)->begin(), work(exec)->end());
  return status;
}
}

namespace {

// A call that launches the numbers in `work`: (status, what the runtime was asked for, what was done).
// With "launch" in `refused` its first launch fails.
struct Call {
  int64_t key;
  Work work;
};

py::tuple run(jax_fa3::KeptGraphs<int64_t>* graphs, const Call& call, bool is_short,
              const std::set<std::string>& refused) {
  fake.asked.clear(), fake.done.clear(), fake.refused = refused;
  const auto launch = [&](cudaStream_t stream) {
    if ((stream == kOwnStream) != fake.recording) return cudaErrorInvalidValue;
    if (refused.count("launch") != 0) return cudaErrorInvalidConfiguration;
    Work& to = fake.recording ? fake.recorded : fake.done;
    to.insert(to.end(), call.work.begin(), call.work.end());
    return cudaGetLastError();
  };
  const cudaError_t status = graphs != nullptr
                                 ? graphs->run(call.key, kStream, launch)
                                 : jax_fa3::launch_short(is_short, call.key, kStream, launch);
  return py::make_tuple(static_cast<int>(status), fake.asked, fake.done);
}

}  // namespace

void bind_graphs(py::module_& module) {
  using Graphs = jax_fa3::KeptGraphs<int64_t>;
  py::class_<Graphs>(module, "KeptGraphs")
      .def(py::init<>())
      .def_property_readonly_static("most", [](const py::object&) { return Graphs::kMost + 0; })
      .def("run",
           [](Graphs& graphs, int64_t key, const Work& work, const std::set<std::string>& refused) {
             return run(&graphs, Call{key, work}, true, refused);
           });
  module.def("launch_short", [](bool is_short, int64_t key, const Work& work,
                                const std::set<std::string>& refused) {
    return run(nullptr, Call{key, work}, is_short, refused);
  });
  // (message, CUDA's last error) after a launch that answers `status`.
  module.def("launched", [](int status) {
    fake.last = static_cast<cudaError_t>(status);
    const std::string message = jax_fa3::Checker("target").launched(fake.last).message();
    return py::make_tuple(message, static_cast<int>(fake.last));
  });
}
