// Launchers of the layer norm variants; the table in layer_norm.cc says when each is taken.
#pragma once

#include <initializer_list>

#include "device/row_packs.h"
#include "kernels/layer_norm/layer_norm.h"

namespace ortplugins {

Status launch_layer_norm_cpu_avx512(const LayerNormParams& params, const ExecContext& context);
Status launch_layer_norm_cpu_avx2(const LayerNormParams& params, const ExecContext& context);
Status launch_layer_norm_cpu_generic(const LayerNormParams& params, const ExecContext& context);

#if ORTPLUGINS_WITH_CUDA
inline int64_t layer_norm_row_packs(const LayerNormParams& params) {
  return row_packs(params.x, params.cols, static_cast<int64_t>(size_of(params.dtype)));
}

// Whether rows are whole packs and every tensor lies on a pack boundary.
inline bool layer_norm_aligned(const LayerNormParams& p) {
  uintptr_t low_bits = static_cast<uintptr_t>(p.cols) * size_of(p.dtype);
  for (const void* data :
       {p.x, p.residual, p.gamma, p.beta, p.bias, static_cast<const void*>(p.y), static_cast<const void*>(p.sum)}) {
    low_bits |= reinterpret_cast<uintptr_t>(data);
  }
  return low_bits % 16 == 0;
}

constexpr int64_t kLayerNormWarpElements = 1024;  // a warp holds 32 for each lane in registers
constexpr int64_t kLayerNormBlockElements = 12288;  // as packs, in the registers of a block
constexpr int64_t kLayerNormRingWarpElements = 768;  // a warp of the variant `ring` holds three packs for each lane

// Dynamic shared memory that a block may take beside its few static words.
inline int layer_norm_shared_bytes(const DeviceInfo& device) { return device.max_smem_per_block - 256; }

Status launch_layer_norm_warp_per_row(const LayerNormParams& params, const ExecContext& context);
Status launch_layer_norm_block_registers(const LayerNormParams& params, const ExecContext& context);
Status launch_layer_norm_ring(const LayerNormParams& params, const ExecContext& context);
Status launch_layer_norm_block_shared(const LayerNormParams& params, const ExecContext& context);
Status launch_layer_norm_block_reread(const LayerNormParams& params, const ExecContext& context);
#endif

}  // namespace ortplugins
