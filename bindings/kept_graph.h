// A short call's launches as one CUDA graph, kept for the next call with the same arrays: a launch costs
// the host 3.5 to 4 us, a graph of one or of five 1.3 (docs/design/host.md).
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace jax_fa3 {

// Whether CUDA records what the stream is given into a graph; true also where it does not say.
inline bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // else it would be taken for that of a launch
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

// Of all handlers, for tests.
inline std::atomic<int64_t> graph_launches{0};

// The graphs of one handler. All that its launches depend on is a Key, compared by its bytes: whoever
// fills one clears it first, padding included.
template <class Key>
class KeptGraphs {
 public:
  static constexpr int kMost = 16;

  // Puts on `stream` what launch(stream) does.
  template <class Launch>
  cudaError_t run(const Key& key, cudaStream_t stream, const Launch& launch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Kept* kept = graph_of(key);
    if (kept == nullptr) {
      cudaGraph_t recorded = nullptr;
      const cudaError_t status = record(&recorded, launch);
      if (status != cudaSuccess) return status;
      if (recorded != nullptr) {
        kept = keep(key, recorded);
        cudaGraphDestroy(recorded);
      }
      if (kept == nullptr) {
        cudaGetLastError();  // what CUDA refused is no error of the call
        return launch(stream);
      }
    }
    kept->used = ++clock_;
    graph_launches.fetch_add(1, std::memory_order_relaxed);
    const cudaError_t status = cudaGraphLaunch(kept->graph, stream);
    if (status != cudaSuccess) cudaGetLastError();  // else it would be taken for the next launch's
    return status;
  }

 private:
  // CTAs of a cluster for each node, at most 1 where there is none. A graph is changed to one of its own
  // form only: an update is not known to change clusters.
  using Form = std::vector<unsigned>;

  struct Kept {
    cudaGraphExec_t graph = nullptr;
    Form form;
    uint64_t used = 0;  // when last
    Key key;
  };

  Kept* graph_of(const Key& key) {
    for (Kept& kept : kept_) {
      if (kept.graph != nullptr && std::memcmp(&kept.key, &key, sizeof(Key)) == 0) return &kept;
    }
    return nullptr;
  }

  // Makes `recorded` the graph of `key`, or returns null where CUDA refuses. A graph in flight ends as
  // it began.
  Kept* keep(const Key& key, cudaGraph_t recorded) {
    Form form;
    if (form_of(recorded, &form) != cudaSuccess) return nullptr;
    Kept& kept = place_for(form);
    cudaGraphExecUpdateResultInfo changes;
    if (kept.graph != nullptr &&
        (kept.form != form || cudaGraphExecUpdate(kept.graph, recorded, &changes) != cudaSuccess)) {
      cudaGetLastError();
      cudaGraphExecDestroy(kept.graph);
      kept.graph = nullptr;
    }
    if (kept.graph == nullptr && cudaGraphInstantiate(&kept.graph, recorded, 0) != cudaSuccess) {
      kept.graph = nullptr;
      return nullptr;
    }
    kept.form = std::move(form);
    std::memcpy(&kept.key, &key, sizeof(Key));
    return &kept;
  }

  static cudaError_t form_of(cudaGraph_t graph, Form* form) {
    size_t count = 0;
    cudaError_t status = cudaGraphGetNodes(graph, nullptr, &count);
    if (status != cudaSuccess) return status;
    std::vector<cudaGraphNode_t> nodes(count);
    status = cudaGraphGetNodes(graph, nodes.data(), &count);
    for (size_t i = 0; i < nodes.size() && status == cudaSuccess; ++i) {
      cudaGraphNodeType type;
      cudaLaunchAttributeValue value{};
      status = cudaGraphNodeGetType(nodes[i], &type);
      if (status == cudaSuccess && type == cudaGraphNodeTypeKernel) {
        status =
            cudaGraphKernelNodeGetAttribute(nodes[i], cudaLaunchAttributeClusterDimension, &value);
      }
      form->push_back(value.clusterDim.x * value.clusterDim.y * value.clusterDim.z);
    }
    return status;
  }

  // No graph, or the one that was not used for longest: of the same form, because to change a graph is
  // quick and to make one takes 55 us.
  Kept& place_for(const Form& form) {
    Kept* best = &kept_[0];
    for (Kept& kept : kept_) {
      if (kept.graph == nullptr) return kept;
      const bool fits = kept.form == form, best_fits = best->form == form;
      if (fits != best_fits ? fits : kept.used < best->used) best = &kept;
    }
    return *best;
  }

  // Into *graph, or null where CUDA refuses; returns the error of `launch`. On a stream of its own:
  // meanwhile others may launch on that of the call.
  template <class Launch>
  cudaError_t record(cudaGraph_t* graph, const Launch& launch) {
    if (stream_ == nullptr &&
        cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) {
      return cudaSuccess;
    }
    if (cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed) != cudaSuccess) {
      return cudaSuccess;
    }
    const cudaError_t launched = launch(stream_);
    const cudaError_t ended = cudaStreamEndCapture(stream_, graph);
    if (launched == cudaSuccess && ended == cudaSuccess) return cudaSuccess;
    if (*graph != nullptr) cudaGraphDestroy(*graph);
    *graph = nullptr;
    return launched;
  }

  std::mutex mutex_;
  uint64_t clock_ = 0;
  cudaStream_t stream_ = nullptr;
  std::array<Kept, kMost> kept_;
};

// A graph is made while the program runs, and CUDA may wait for the device there. Among devices of one
// process that run a collective, one could wait for another for ever.
inline bool sees_one_device() {
  static const bool one = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count == 1;
  }();
  return one;
}

// What a handler launches, as a kept graph if the call `is_short`. `params` are all that the launches
// depend on beside the stream; their bytes were cleared before they were filled. A stream that is being
// recorded, as XLA does for its own graphs, records the launches.
template <class Params, class Launch>
cudaError_t launch_short(bool is_short, const Params& params, cudaStream_t stream,
                         const Launch& launch) {
  if (!is_short || !sees_one_device() || is_recorded(stream)) return launch(stream);
  struct Key {
    Params params;
    cudaStream_t stream;  // launches of one graph wait for each other, on whatever streams
  };
  Key key;
  std::memset(&key, 0, sizeof(key));
  std::memcpy(&key.params, &params, sizeof(params));
  key.stream = stream;
  static auto& graphs = *new KeptGraphs<Key>;  // never destroyed: the driver may go first
  return graphs.run(key, stream, launch);
}

}  // namespace jax_fa3
