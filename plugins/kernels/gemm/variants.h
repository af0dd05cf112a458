// Launchers of the gemm variants; the table in gemm.cc says when each is taken.
#pragma once

#include "kernels/gemm/gemm.h"

namespace ortplugins {

Status launch_gemm_cpu_avx512(const GemmParams& params, const ExecContext& context);
Status launch_gemm_cpu_avx2(const GemmParams& params, const ExecContext& context);
Status launch_gemm_cpu_generic(const GemmParams& params, const ExecContext& context);

// Constant b, batch matrices one after the other, in the layout of the CPU kernels of an instruction set. The buffer has
// any alignment but must not be moved; a kernel of another instruction set takes b as it is instead.
int64_t packed_gemm_b_bytes_cpu_avx512(int64_t batch, int64_t k, int64_t n);
int64_t packed_gemm_b_bytes_cpu_avx2(int64_t batch, int64_t k, int64_t n);
int64_t packed_gemm_b_bytes_cpu_generic(int64_t batch, int64_t k, int64_t n);
void pack_gemm_b_cpu_avx512(const void* b, DType dtype, bool trans, int64_t batch, int64_t k, int64_t n, void* packed);
void pack_gemm_b_cpu_avx2(const void* b, DType dtype, bool trans, int64_t batch, int64_t k, int64_t n, void* packed);
void pack_gemm_b_cpu_generic(const void* b, DType dtype, bool trans, int64_t batch, int64_t k, int64_t n, void* packed);

#if ORTPLUGINS_WITH_CUDA
Status launch_gemm_sm80_mma(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm80_tf32(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm80_tf32x3(const GemmParams& params, const ExecContext& context);
Status launch_gemm_simt_128x64(const GemmParams& params, const ExecContext& context);
Status launch_gemm_simt_64x64(const GemmParams& params, const ExecContext& context);
#endif

#if ORTPLUGINS_WITH_SM90A
Status launch_gemm_sm90a_simt(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_small(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_small_half(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_small_tf32(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_small_tf32x3(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_skinny(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_split_128x128(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_split_128x64(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_split_64x64(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_tf32_pair(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_tf32(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_tf32x3(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_128x192(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_128x256(const GemmParams& params, const ExecContext& context);

Status launch_gemm_sm90a_fp16x3(const GemmParams& params, const ExecContext& context);
Status launch_gemm_sm90a_fp16(const GemmParams& params, const ExecContext& context);
int64_t gemm_sm90a_fp16x3_workspace_bytes(const GemmParams& params, const DeviceInfo& device);
int64_t gemm_sm90a_fp16_workspace_bytes(const GemmParams& params, const DeviceInfo& device);
#endif

}  // namespace ortplugins
