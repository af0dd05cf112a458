// Launchers of the attention variants; the table in attention.cc says when each is taken.
#pragma once

#include "kernels/attention/attention.h"

namespace ortplugins {

Status launch_attention_cpu_avx512(const AttentionParams& params, const ExecContext& context);
Status launch_attention_cpu_avx2(const AttentionParams& params, const ExecContext& context);
Status launch_attention_cpu_generic(const AttentionParams& params, const ExecContext& context);
int64_t attention_cpu_workspace_bytes_avx512(const AttentionParams& params, const DeviceInfo& device);
int64_t attention_cpu_workspace_bytes_avx2(const AttentionParams& params, const DeviceInfo& device);
int64_t attention_cpu_workspace_bytes_generic(const AttentionParams& params, const DeviceInfo& device);

#if ORTPLUGINS_WITH_CUDA
Status launch_attention_simt(const AttentionParams& params, const ExecContext& context);
bool attention_simt_supports(const AttentionParams& params, const DeviceInfo& device, int64_t dim);  // float32; heads of at most `dim`
Status launch_attention_simt_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_simt_few_16(const AttentionParams& params, const ExecContext& context);
Status launch_attention_simt_few_32(const AttentionParams& params, const ExecContext& context);
Status launch_attention_simt_short(const AttentionParams& params, const ExecContext& context);
Status launch_attention_simt_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_simt_256(const AttentionParams& params, const ExecContext& context);
Status launch_attention_simt_split(const AttentionParams& params, const ExecContext& context);
int64_t attention_simt_split_workspace(const AttentionParams& params, const DeviceInfo& device);
Status launch_attention_mma_split_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_mma_split_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_mma_split_256(const AttentionParams& params, const ExecContext& context);
int64_t attention_mma_split_workspace(const AttentionParams& params, const DeviceInfo& device);
Status launch_attention_tf32x3_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_tf32x3_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_tf32x3_256(const AttentionParams& params, const ExecContext& context);
Status launch_attention_tf32_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_tf32_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_tf32_256(const AttentionParams& params, const ExecContext& context);
Status launch_attention_mma_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_mma_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_mma_256(const AttentionParams& params, const ExecContext& context);
#endif
#if ORTPLUGINS_WITH_SM90A
bool attention_fp16_supports(const AttentionParams& params, const DeviceInfo& device, int64_t dim);  // float32; heads of at most `dim`
Status launch_attention_fp16x3_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_fp16x3_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_fp16_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_fp16_128(const AttentionParams& params, const ExecContext& context);
int64_t attention_fp16x3_64_workspace(const AttentionParams& params, const DeviceInfo& device);
int64_t attention_fp16x3_128_workspace(const AttentionParams& params, const DeviceInfo& device);
int64_t attention_fp16_64_workspace(const AttentionParams& params, const DeviceInfo& device);
int64_t attention_fp16_128_workspace(const AttentionParams& params, const DeviceInfo& device);
bool attention_wgmma_supports(const AttentionParams& params, const DeviceInfo& device, int64_t dim);  // heads of at most `dim`
bool attention_wgmma_supports_plain(const AttentionParams& params, const DeviceInfo& device, int64_t dim);  // and masks of keys
bool attention_wgmma_supports_rows(const AttentionParams& params, const DeviceInfo& device, int64_t dim);  // and masks of rows
bool attention_wgmma_split_supports(const AttentionParams& params, const DeviceInfo& device);
int64_t attention_wgmma_split_workspace(const AttentionParams& params, const DeviceInfo& device);
Status launch_attention_wgmma_split(const AttentionParams& params, const ExecContext& context);
bool attention_short_supports(const AttentionParams& params, const DeviceInfo& device, int64_t len);  // of at most `len` keys
Status launch_attention_short_80(const AttentionParams& params, const ExecContext& context);
Status launch_attention_short_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_256x40(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_256x64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_256x72(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_64x64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_64(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_256x80(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_256x96(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_80(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_96(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_128(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_192(const AttentionParams& params, const ExecContext& context);
Status launch_attention_wgmma_256(const AttentionParams& params, const ExecContext& context);
#endif

}  // namespace ortplugins
