// Launchers of the softmax variants; the table in softmax.cc says when each is taken.
#pragma once

#include "kernels/softmax/softmax.h"

namespace ortplugins {

Status launch_softmax_cpu_avx512(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_cpu_avx2(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_cpu_generic(const SoftmaxParams& params, const ExecContext& context);

#if ORTPLUGINS_WITH_CUDA
// 16-byte packs that rows span at most, on top of up to two packs at their ends that are not whole.
inline int64_t softmax_row_packs(const SoftmaxParams& params) {
  return params.cols * static_cast<int64_t>(size_of(params.dtype)) / 16;
}

constexpr int64_t kSoftmaxWarpElements = 1024;    // a warp holds 32 for each lane in registers
constexpr int64_t kSoftmaxBlockElements = 16384;  // a block of 512 threads does the same
constexpr int kSoftmaxClusterBlocks = 8;          // the most that every device with clusters allows

// Whether kernels may serve that know no mask, and fill up with -inf before they scale.
inline bool softmax_is_plain(const SoftmaxParams& p) {
  return p.mask_dtype == DType::kNone && p.scale != 0.0F && p.scale > -1e38F && p.scale < 1e38F;
}

// Dynamic shared memory that a block may take beside its few static words.
inline int softmax_shared_bytes(const DeviceInfo& device) { return device.max_smem_per_block - 2048; }

// How the variant `resident` shares a row out.
constexpr int kSoftmaxResidentPacks = 8;  // of a thread, in registers: it takes 64 of these
struct SoftmaxResidentShape {
  int64_t slice_packs;  // of a block
  int blocks, threads;  // of a cluster; of a block

  int64_t smem_bytes() const {
    const int64_t in_registers = int64_t{kSoftmaxResidentPacks} * threads;
    return slice_packs > in_registers ? (slice_packs - in_registers) * 16 : 0;
  }
};
SoftmaxResidentShape softmax_resident_shape(const SoftmaxParams& params, const DeviceInfo& device);

Status launch_softmax_warp_per_row(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_block_registers(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_resident(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_block_shared(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_cluster_shared(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_split(const SoftmaxParams& params, const ExecContext& context);
int64_t softmax_split_workspace(const SoftmaxParams& params, const DeviceInfo& device);
Status launch_softmax_block_online(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_strided_online(const SoftmaxParams& params, const ExecContext& context);
#endif

}  // namespace ortplugins
