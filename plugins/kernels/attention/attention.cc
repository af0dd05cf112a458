#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/op.h"
#include "kernels/attention/variants.h"
#include "op_specs.h"

namespace ortplugins {
namespace {

struct Dims {
  int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  AttentionStrides strides;
  int64_t part_stride = 0;  // elements from the queries of a packed tensor to its keys, and from those to its values
};

constexpr bool is_packed(Layout layout) { return layout == Layout::kBs3nh || layout == Layout::kBsn3h; }

Dims bind_tensor(const Shape& shape, Layout layout, int64_t heads) {
  if (shape.rank == 3) {
    const int64_t dim = heads > 0 ? shape[2] / heads : 0;
    return {shape[0], shape[1], heads, dim, {shape[1] * shape[2], shape[2], dim}};
  }
  if (layout == Layout::kBs3nh) {
    return {shape[0], shape[1], shape[3], shape[4], {shape.product(1, 5), shape.product(2, 5), shape[4]}, shape.product(3, 5)};
  }
  if (layout == Layout::kBsn3h) {
    return {shape[0], shape[1], shape[2], shape[4], {shape.product(1, 5), shape.product(2, 5), shape.product(3, 5)}, shape[4]};
  }
  if (layout == Layout::kBsnh) {
    return {shape[0], shape[1], shape[2], shape[3], {shape.product(1, 4), shape.product(2, 4), shape[3]}};
  }
  return {shape[0], shape[2], shape[1], shape[3], {shape.product(1, 4), shape[3], shape.product(2, 4)}};
}

Status bind_mask(const TensorRef& mask, AttentionParams* p) {
  if (mask.shape.rank < 1 || mask.shape.rank > 4) return Status::invalid("mask", "expected a rank of 1 to 4, got {}", {mask.shape.rank});
  Shape target;
  target.rank = 4;
  target.dims[0] = p->batch;
  target.dims[1] = p->heads;
  target.dims[2] = p->q_len;
  target.dims[3] = p->total_len();
  const int64_t last = mask.shape[-1];
  p->mask_len = p->total_len();
  if (last != 1 && last < p->total_len()) target.dims[3] = p->mask_len = last;  // the rest counts as -inf
  int64_t strides[kMaxRank];
  if (!broadcast_strides(mask.shape, target, strides)) {
    return Status::invalid("mask", "does not broadcast to ({}, {}, {}, {})", {p->batch, p->heads, p->q_len, p->total_len()});
  }
  p->mask = mask.data;
  p->mask_dtype = mask.dtype;
  p->mask_stride_batch = strides[0];
  p->mask_stride_head = strides[1];
  p->mask_stride_seq = strides[2];
  p->mask_stride_key = strides[3];
  return {};
}

Status bind(const OpArgs& args, AttentionParams* p) {
  using namespace attention_spec;
  const TensorRef* in = args.inputs;
  const AttrValue* attrs = args.attrs;
  for (const int i : {input::kK, input::kV}) {
    if (in[i].shape.rank != in[input::kQ].shape.rank) {
      return Status::invalid(kInputs[i].name, "its rank is {}, that of q {}", {in[i].shape.rank, in[input::kQ].shape.rank});
    }
  }
  const auto layout = static_cast<Layout>(attrs[attr::kLayout].i);
  const auto data = [&](int i, const Dims& dims) -> const void* {
    if (in[i].data == nullptr) return nullptr;
    return static_cast<const std::byte*>(in[i].data) + (i - input::kQ) * dims.part_stride * static_cast<int64_t>(size_of(in[i].dtype));
  };
  if (is_packed(layout)) {
    for (const int i : {input::kQ, input::kK, input::kV}) {
      const Shape& shape = in[i].shape;
      if (shape.rank != 5) return Status::invalid(kInputs[i].name, "expected rank 5 in a packed layout, got {}", {shape.rank});
      const int64_t parts = shape[layout == Layout::kBs3nh ? 2 : 3];
      if (parts != 3) return Status::invalid(kInputs[i].name, "expected 3 parts (queries, keys, values), got {}", {parts});
    }
  }
  const Dims q = bind_tensor(in[input::kQ].shape, layout, attrs[attr::kNumHeads].i);
  const Dims k = bind_tensor(in[input::kK].shape, layout, attrs[attr::kKvNumHeads].i);
  const Dims v = bind_tensor(in[input::kV].shape, layout, attrs[attr::kKvNumHeads].i);
  if (k.heads == 0 ? q.heads != 0 : q.heads % k.heads != 0) {
    return Status::invalid("q", "has {} heads, not a multiple of the {} heads of k", {q.heads, k.heads});
  }
  p->q = data(input::kQ, q);
  p->k = data(input::kK, k);
  p->v = data(input::kV, v);
  p->y = args.outputs[output::kY].data;
  p->dtype = in[input::kQ].dtype;
  p->q_strides = q.strides;
  p->k_strides = k.strides;
  p->v_strides = v.strides;
  p->batch = q.batch;
  p->heads = q.heads;
  p->kv_heads = k.heads;
  p->q_len = q.seq;
  p->kv_len = k.seq;
  p->head_dim = q.dim;
  p->v_head_dim = v.dim;
  p->y_strides = bind_tensor(args.outputs[output::kY].shape, layout, q.heads).strides;

  if (in[input::kPastK].present() != in[input::kPastV].present()) {
    return Status::invalid("past_k", "past_k and past_v must be given together");
  }
  if (in[input::kPastK].present()) {
    if (in[input::kTotalLengths].present()) return Status::invalid("total_lengths", "cannot be combined with past_k");
    for (const int i : {input::kPastK, input::kPastV}) {
      if (in[i].shape[1] != k.heads) return Status::invalid(kInputs[i].name, "has {} heads, k and v {}", {in[i].shape[1], k.heads});
    }
    p->past_k = in[input::kPastK].data;
    p->past_v = in[input::kPastV].data;
    p->past_len = in[input::kPastK].shape[2];
  }
  if (args.outputs[output::kPresentK].present()) p->present_k = args.outputs[output::kPresentK].data;
  if (args.outputs[output::kPresentV].present()) p->present_v = args.outputs[output::kPresentV].data;
  if (in[input::kTotalLengths].present()) p->total_lengths = static_cast<const int64_t*>(in[input::kTotalLengths].data);
  if (in[input::kMask].present()) ORTPLUGINS_RETURN_IF_ERROR(bind_mask(in[input::kMask], p));

  // Without a head dimension every score is an empty sum: any finite scale gives the zeros that it must.
  const float default_scale = p->head_dim > 0 ? 1.0F / std::sqrt(static_cast<float>(p->head_dim)) : 1.0F;
  p->scale = attrs[attr::kScale].is_set ? attrs[attr::kScale].f : default_scale;
  p->softcap = attrs[attr::kSoftcap].f;
  p->is_causal = attrs[attr::kIsCausal].i != 0;
  constexpr int64_t kWidest = int64_t{1} << 40;  // wider than any sequence, and far from overflow when positions are added
  p->window = std::min(attrs[attr::kWindow].i, kWidest);
  p->window_right = std::min(attrs[attr::kWindowRight].i, kWidest);
  p->precision = static_cast<Precision>(attrs[attr::kPrecision].i);
  return {};
}

bool supports_any(const AttentionParams&, const DeviceInfo&) { return true; }

#if ORTPLUGINS_WITH_CUDA
bool is_half(const AttentionParams& p) { return p.dtype != DType::kFloat32; }
bool fits_head(const AttentionParams& p, int64_t dim) { return p.head_dim <= dim && p.v_head_dim <= dim; }

template <int64_t kDim>
bool supports_mma(const AttentionParams& p, const DeviceInfo& device) {
  return device.sm >= 80 && is_half(p) && fits_head(p, kDim);
}
// Few queries: the heads of a group share a tile of 16 rows, and the keys are split over blocks.
bool supports_simt_split(const AttentionParams& p, const DeviceInfo&) { return p.q_len <= 16; }
template <int64_t kDim>
bool supports_mma_split(const AttentionParams& p, const DeviceInfo& device) {
  return supports_mma<kDim>(p, device) && p.q_len <= 16;
}
template <int64_t kDim>
bool supports_simt_float(const AttentionParams& p, const DeviceInfo& device) {
  return attention_simt_supports(p, device, kDim);
}
// Two blocks of 128 rows share a multiprocessor, or three of 64; the larger read k and v less often.
bool suits_simt_128(const AttentionParams& p, const DeviceInfo& device) {
  const auto rounds = [&](int64_t rows, int64_t blocks) {
    const int64_t slots = std::max(device.sm_count, 1) * blocks;
    return ((p.q_len + rows - 1) / rows * p.heads * p.batch + slots - 1) / slots;
  };
  return rounds(128, 2) * 4 <= rounds(64, 3) * 3;
}
// Few tiles: small ones, whose keys four warps share. Tensor cores take over where there is more to multiply, though their rows
// need three launches. H200, 12 heads of 64, us, 16, 32 and 64 rows, and fp16x3: 1 x 128 9.2, 10.5, 16.9, 14.7; 2 x 128 11.3, 10.8,
// 17.3, 15.1; 4 x 128 21.0, 15.5, 17.4, 16.5; 8 x 128 31.7, 25.3, 23.0, 19.2; 8 x 64 20.1, 15.2, 12.6, 16.9; 1 x 256 16.9, 15.8, 27.7,
// 17.0; 2 x 256 32.1, 24.7, 28.0, 18.6; 1 x 512 53.2, 42.2, 48.8, 22.8.
template <int64_t kBlockM>
bool suits_simt_few(const AttentionParams& p, const DeviceInfo& device) {
  const int64_t blocks = (p.q_len + kBlockM - 1) / kBlockM * p.heads * p.batch, sms = device.sm_count;
  if (p.precision != Precision::kIeee && blocks * p.total_len() > 190 * sms) return false;
  return kBlockM == 16 ? blocks <= sms : 2 * blocks <= 3 * sms && (p.total_len() > 64 || blocks <= sms);
}
// A variant more exact than what is asked for may serve, never one that is less.
template <int64_t kDim>
bool supports_tf32x3(const AttentionParams& p, const DeviceInfo& device) {
  return device.sm >= 80 && p.dtype == DType::kFloat32 && p.precision != Precision::kIeee && fits_head(p, kDim);
}
template <int64_t kDim>
bool supports_tf32(const AttentionParams& p, const DeviceInfo& device) {
  return supports_tf32x3<kDim>(p, device) && p.precision == Precision::kTf32;
}
#endif
#if ORTPLUGINS_WITH_SM90A
template <int64_t kDim>
bool supports_wgmma(const AttentionParams& p, const DeviceInfo& device) {
  return attention_wgmma_supports(p, device, kDim);
}
template <int64_t kDim>
bool supports_fp16x3(const AttentionParams& p, const DeviceInfo& device) {
  return attention_fp16_supports(p, device, kDim);
}
template <int64_t kDim>
bool supports_fp16(const AttentionParams& p, const DeviceInfo& device) {
  return attention_fp16_supports(p, device, kDim) && p.precision == Precision::kTf32;
}
// Three kernels, 15 us at least; the one of sm_80 takes 7 us, and 5 us for each 32 keys, one tile after the other.
bool suits_fp16(const AttentionParams& p, const DeviceInfo&) { return p.total_len() >= 64; }
// Shorter caches leave most multiprocessors idle, and merging costs a second kernel.
bool suits_wgmma_split(const AttentionParams& p, const DeviceInfo&) { return p.total_len() >= 256; }
template <int64_t kDim>
bool supports_wgmma_plain(const AttentionParams& p, const DeviceInfo& device) {
  return attention_wgmma_supports_plain(p, device, kDim);
}
template <int64_t kDim>
bool supports_wgmma_rows(const AttentionParams& p, const DeviceInfo& device) {
  return attention_wgmma_supports_rows(p, device, kDim);
}
// All keys in one tile of `kLen`. H200, heads of 64, us, the row of 128 and the best without it: 1 x 12 x 128 2.4 and 4.1,
// 8 x 12 x 128 3.3 and 4.9, 256 x 12 x 128 52.7 and 60.3. The row of 80, that of 128 and the best without them: 32 x 12 x 77,
// causal, 5.4, 6.4 and 8.5, 2 x 10 x 4096 queries of 77 keys 8.0, 9.9 and 14.7. With a bias, from memory: 1 x 12 x 128 2.8 and
// 5.1, 8 x 12 x 128 4.7 and 5.9, 32 x 12 x 77, causal, 9.0 and 16.1.
template <int64_t kLen>
bool supports_short(const AttentionParams& p, const DeviceInfo& device) {
  return attention_short_supports(p, device, kLen);
}
// Few queries of many grouped heads are for tiles that hold all heads of a group. H200, heads of 64, one query, us, this row and
// sm80_mma_16x64x64_s4_split: 1 x 12 heads, 128 keys 2.1 and 6.3, 64 x 12, 100 keys 5.5 and 14.9; groups of four, 16 x 32, 128 keys
// 3.8 and 6.9, 64 x 32 12.0 and 14.1; groups of eight, 128 x 32, 80 keys 16.9 and 14.9.
bool suits_short(const AttentionParams& p, const DeviceInfo& device) {
  return p.q_len > 16 || p.heads <= 4 * p.kv_heads || p.heads * p.batch <= int64_t{8} * device.sm_count;
}
// What a launch costs in tiles of 128 rows that are 100 each: the rounds it takes until every block has been on one of the
// multiprocessors, times the measured cost of a block.
int64_t wgmma_cost(const AttentionParams& p, const DeviceInfo& device, int64_t block_m, int64_t block_cost) {
  const int64_t blocks = (p.q_len + block_m - 1) / block_m * p.heads * p.batch, sms = std::max(device.sm_count, 1);
  return (blocks + sms - 1) / sms * block_cost;
}
bool suits_wgmma_256(const AttentionParams& p, const DeviceInfo& device) {
  return wgmma_cost(p, device, 256, 165) <= wgmma_cost(p, device, 128, 100);
}
// Tiles of 64 rows are for numbers of short sequences: while one block starts or ends, another one on the same multiprocessor
// computes. Longer ones would read the keys too often. And they are for few keys, where a block has little more to do than to
// start and end. H200, 12 heads of 64, us, 64 and 128 rows: 4 x 256 6.5 and 6.7, 2 x 384 8.0 and 7.4, 1 x 512 9.1 and 8.2, 2 x 512
// 9.5 and 8.6, 8 x 384 14.6 and 17.7, causal 10.1 and 15.2.
bool suits_wgmma_64(const AttentionParams& p, const DeviceInfo& device) {
  const int64_t blocks = (p.q_len + 63) / 64 * p.heads * p.batch;
  return p.q_len <= 512 && (blocks > int64_t{2} * device.sm_count || p.total_len() <= 256);
}
#endif

constexpr Variant<AttentionParams> kAttentionVariants[] = {
#if ORTPLUGINS_WITH_SM90A
    {169, "sm90a_wgmma_64x80x64_s1", DeviceKind::kCuda, supports_short<80>, launch_attention_short_80, nullptr, suits_short},
    {168, "sm90a_wgmma_64x128x64_s1", DeviceKind::kCuda, supports_short<128>, launch_attention_short_128, nullptr, suits_short},
    {166, "sm90a_wgmma_64x96x128_s4_split", DeviceKind::kCuda, attention_wgmma_split_supports, launch_attention_wgmma_split,
     attention_wgmma_split_workspace, suits_wgmma_split},
#endif
#if ORTPLUGINS_WITH_CUDA
    {121, "sm80_mma_16x64x64_s4_split", DeviceKind::kCuda, supports_mma_split<64>, launch_attention_mma_split_64,
     attention_mma_split_workspace},
    {122, "sm80_mma_16x64x128_s2_split", DeviceKind::kCuda, supports_mma_split<128>, launch_attention_mma_split_128,
     attention_mma_split_workspace},
    {123, "sm80_mma_16x32x256_s2_split", DeviceKind::kCuda, supports_mma_split<256>, launch_attention_mma_split_256,
     attention_mma_split_workspace},
    {102, "simt_fp32_16x64_split", DeviceKind::kCuda, supports_simt_split, launch_attention_simt_split,
     attention_simt_split_workspace},
#if ORTPLUGINS_WITH_SM90A
    {162, "sm90a_wgmma_64x64x64_s2", DeviceKind::kCuda, supports_wgmma_rows<64>, launch_attention_wgmma_64x64, nullptr, suits_wgmma_64},
    {160, "sm90a_wgmma_256x64x40_s6", DeviceKind::kCuda, supports_wgmma_plain<40>, launch_attention_wgmma_256x40, nullptr,
     suits_wgmma_256},
    {161, "sm90a_wgmma_256x64x64_s8", DeviceKind::kCuda, supports_wgmma_rows<64>, launch_attention_wgmma_256x64, nullptr,
     suits_wgmma_256},
    {151, "sm90a_wgmma_128x128x64_s2", DeviceKind::kCuda, supports_wgmma<64>, launch_attention_wgmma_64},
    {164, "sm90a_wgmma_256x64x72_s3", DeviceKind::kCuda, supports_wgmma_plain<72>, launch_attention_wgmma_256x72, nullptr,
     suits_wgmma_256},
    {165, "sm90a_wgmma_256x48x80_s4", DeviceKind::kCuda, supports_wgmma_plain<80>, launch_attention_wgmma_256x80, nullptr,
     suits_wgmma_256},
    {154, "sm90a_wgmma_128x128x80_s2", DeviceKind::kCuda, supports_wgmma<80>, launch_attention_wgmma_80},
    {167, "sm90a_wgmma_256x48x96_s4", DeviceKind::kCuda, supports_wgmma_plain<96>, launch_attention_wgmma_256x96, nullptr,
     suits_wgmma_256},
    {155, "sm90a_wgmma_128x128x96_s2", DeviceKind::kCuda, supports_wgmma<96>, launch_attention_wgmma_96},
    {152, "sm90a_wgmma_128x128x128_s2", DeviceKind::kCuda, supports_wgmma<128>, launch_attention_wgmma_128},
    {156, "sm90a_wgmma_128x96x192_s2", DeviceKind::kCuda, supports_wgmma<192>, launch_attention_wgmma_192},
    {158, "sm90a_wgmma_128x80x256_s2", DeviceKind::kCuda, supports_wgmma<256>, launch_attention_wgmma_256},
#endif
    {107, "simt_fp32_16x128x64", DeviceKind::kCuda, supports_simt_float<64>, launch_attention_simt_few_16, nullptr, suits_simt_few<16>},
    {108, "simt_fp32_32x128x64", DeviceKind::kCuda, supports_simt_float<64>, launch_attention_simt_few_32, nullptr, suits_simt_few<32>},
#if ORTPLUGINS_WITH_SM90A
    {173, "sm90a_fp16_128x128x64_s2", DeviceKind::kCuda, supports_fp16<64>, launch_attention_fp16_64, attention_fp16_64_workspace,
     suits_fp16},
    {174, "sm90a_fp16_128x64x128_s2", DeviceKind::kCuda, supports_fp16<128>, launch_attention_fp16_128, attention_fp16_128_workspace,
     suits_fp16},
    {171, "sm90a_fp16x3_128x128x64_s2", DeviceKind::kCuda, supports_fp16x3<64>, launch_attention_fp16x3_64,
     attention_fp16x3_64_workspace, suits_fp16},
    {172, "sm90a_fp16x3_128x64x128_s2", DeviceKind::kCuda, supports_fp16x3<128>, launch_attention_fp16x3_128,
     attention_fp16x3_128_workspace, suits_fp16},
#endif
    {131, "sm80_mma_128x64x64", DeviceKind::kCuda, supports_mma<64>, launch_attention_mma_64},
    {132, "sm80_mma_128x32x128", DeviceKind::kCuda, supports_mma<128>, launch_attention_mma_128},
    {133, "sm80_mma_64x32x256", DeviceKind::kCuda, supports_mma<256>, launch_attention_mma_256},
    {144, "sm80_tf32_64x32x64", DeviceKind::kCuda, supports_tf32<64>, launch_attention_tf32_64},
    {145, "sm80_tf32_64x32x128", DeviceKind::kCuda, supports_tf32<128>, launch_attention_tf32_128},
    {146, "sm80_tf32_64x16x256", DeviceKind::kCuda, supports_tf32<256>, launch_attention_tf32_256},
    {141, "sm80_tf32x3_64x32x64", DeviceKind::kCuda, supports_tf32x3<64>, launch_attention_tf32x3_64},
    {142, "sm80_tf32x3_64x32x128", DeviceKind::kCuda, supports_tf32x3<128>, launch_attention_tf32x3_128},
    {143, "sm80_tf32x3_64x16x256", DeviceKind::kCuda, supports_tf32x3<256>, launch_attention_tf32x3_256},
    {103, "simt_fp32_128x64x64", DeviceKind::kCuda, supports_simt_float<64>, launch_attention_simt_64, nullptr, suits_simt_128},
    {106, "simt_fp32_64x64x64", DeviceKind::kCuda, supports_simt_float<64>, launch_attention_simt_short},
    {104, "simt_fp32_128x64x128", DeviceKind::kCuda, supports_simt_float<128>, launch_attention_simt_128},
    {105, "simt_fp32_128x32x256", DeviceKind::kCuda, supports_simt_float<256>, launch_attention_simt_256},
    {101, "simt_fp32_64x64", DeviceKind::kCuda, supports_any, launch_attention_simt},
#endif
    {3, "cpu_avx512", DeviceKind::kCpu, supports_isa<AttentionParams, CpuIsa::kAvx512>, launch_attention_cpu_avx512, attention_cpu_workspace_bytes_avx512},
    {2, "cpu_avx2", DeviceKind::kCpu, supports_isa<AttentionParams, CpuIsa::kAvx2>, launch_attention_cpu_avx2, attention_cpu_workspace_bytes_avx2},
    {1, "cpu_generic", DeviceKind::kCpu, supports_any, launch_attention_cpu_generic, attention_cpu_workspace_bytes_generic},
};

using Functions = OpFunctions<AttentionParams, attention_spec::kSpec, bind, kAttentionVariants>;

}  // namespace

Status attention(const AttentionParams& params, const ExecContext& context, int variant_id) {
  return Functions::run(params, context, variant_id);
}

const Op& attention_op() {
  static constexpr Op op = Functions::make();
  return op;
}

}  // namespace ortplugins
