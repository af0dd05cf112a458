// The library's functions: for ctypes (python/ortplugins/bench/ladder.py).
#include "ladder/ladder.h"

#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

namespace ortplugins::ladder {
namespace {

constexpr Stage<GemmProblem> kGemmStages[] = {
    {"naive", launch_gemm_naive},
    {"coalesced", launch_gemm_coalesced},
    {"shared_tile", launch_gemm_shared_tile},
    {"micro_tile", launch_gemm_micro_tile},
    {"double_buffered", launch_gemm_double_buffered},
    {"three_products", launch_gemm_three_products},
    {"three_products_128", launch_gemm_three_products_128},
    {"three_products_32", launch_gemm_three_products_32},
};
constexpr Stage<SoftmaxProblem> kSoftmaxStages[] = {
    {"three_pass", launch_softmax_three_pass},
    {"online", launch_softmax_online},
    {"vectors", launch_softmax_vectors},
    {"registers", launch_softmax_registers},
    {"shared", launch_softmax_shared},
    {"cluster", launch_softmax_cluster},
};

Status context_of(void* stream, ExecContext* context) {
  int ordinal = 0;
  if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) return Status::cuda("cudaGetDevice", error);
  context->device = cuda_device(ordinal);
  context->stream = stream;
  return context->device != nullptr ? Status{} : Status::unsupported("device", "there is no CUDA device {}", {ordinal});
}

template <class Problem, size_t kCount>
Status run(const Stage<Problem> (&stages)[kCount], const char* name, const Problem& problem, void* stream) {
  ExecContext context;
  ORTPLUGINS_RETURN_IF_ERROR(context_of(stream, &context));
  for (const Stage<Problem>& stage : stages) {
    if (std::strcmp(stage.name, name) == 0) return stage.launch(problem, context);
  }
  return Status::invalid("stage", "is not on the ladder");
}

// A Status for C: `format` holds one {} for each number of `args` that it uses.
struct Result {
  int32_t code;
  const char* tensor;
  const char* format;
  int64_t args[4];
};
void give(const Status& status, Result* result) {
  *result = {static_cast<int32_t>(status.code), status.tensor, status.format, {}};
  std::copy(status.args.begin(), status.args.end(), result->args);
}

}  // namespace
}  // namespace ortplugins::ladder

#define ORTPLUGINS_EXPORT extern "C" __attribute__((visibility("default"))) void
using namespace ortplugins;
using namespace ortplugins::ladder;

ORTPLUGINS_EXPORT ortplugins_ladder_gemm(const char* stage, const float* a, const float* b, float* y, int64_t m, int64_t n, int64_t k,
                                         void* stream, Result* result) {
  give(run(kGemmStages, stage, {a, b, y, m, n, k}, stream), result);
}

ORTPLUGINS_EXPORT ortplugins_ladder_softmax(const char* stage, const float* x, float* y, int64_t rows, int64_t cols, void* stream, Result* result) {
  give(run(kSoftmaxStages, stage, {x, y, rows, cols}, stream), result);
}

// Marks the end of a stage in a profile.
ORTPLUGINS_EXPORT ortplugins_ladder_boundary(Result* result) {
  ExecContext context;
  const Status status = context_of(nullptr, &context);
  give(status.ok() ? launch_boundary(context) : status, result);
}

// Waits for the device, and starts or stops the profiler's collection.
ORTPLUGINS_EXPORT ortplugins_ladder_profile(int on, Result* result) {
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = on != 0 ? cudaProfilerStart() : cudaProfilerStop();
  give(error == cudaSuccess ? Status{} : Status::cuda("cudaProfiler", error), result);
}
