// The ladder: kernels that climb from the obvious to the production ones, one idea at a time, to be read and measured. They
// stand in a library of their own; README.md tells the story.
//
// Float32, row-major, any size and alignment.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "core/status.h"

namespace ortplugins::ladder {

// y (m, n) = a (m, k) b (k, n). The stage `naive` takes b column-major: (n, k) in memory.
struct GemmProblem {
  const float* a;
  const float* b;
  float* y;
  int64_t m, n, k;
};

// y = softmax of each row of x (rows, cols).
struct SoftmaxProblem {
  const float* x;
  float* y;
  int64_t rows, cols;
};

template <class Problem>
struct Stage {
  const char* name;
  Status (*launch)(const Problem& problem, const ExecContext& context);
};

Status launch_gemm_naive(const GemmProblem& problem, const ExecContext& context);
Status launch_gemm_coalesced(const GemmProblem& problem, const ExecContext& context);
Status launch_gemm_shared_tile(const GemmProblem& problem, const ExecContext& context);
Status launch_gemm_micro_tile(const GemmProblem& problem, const ExecContext& context);
Status launch_gemm_double_buffered(const GemmProblem& problem, const ExecContext& context);

// Three tf32 products for one of float32; the sums leave the tensor cores at the end, every 128 of k, every 32.
Status launch_gemm_three_products(const GemmProblem& problem, const ExecContext& context);
Status launch_gemm_three_products_128(const GemmProblem& problem, const ExecContext& context);
Status launch_gemm_three_products_32(const GemmProblem& problem, const ExecContext& context);

Status launch_softmax_three_pass(const SoftmaxProblem& problem, const ExecContext& context);
Status launch_softmax_online(const SoftmaxProblem& problem, const ExecContext& context);
Status launch_softmax_vectors(const SoftmaxProblem& problem, const ExecContext& context);
Status launch_softmax_registers(const SoftmaxProblem& problem, const ExecContext& context);
Status launch_softmax_shared(const SoftmaxProblem& problem, const ExecContext& context);
Status launch_softmax_cluster(const SoftmaxProblem& problem, const ExecContext& context);

// Does nothing: it stands between the stages of a profile.
Status launch_boundary(const ExecContext& context);

}  // namespace ortplugins::ladder
