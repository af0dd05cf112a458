#include "kernels/gemm/gemm.h"

#include "core/op.h"
#include "kernels/gemm/variants.h"
#include "op_specs.h"

namespace ortplugins {
namespace {

// Splits the batch into dimensions over which a and b each advance by one stride, merging neighbours.
void bind_batch(const TensorRef& a, const TensorRef& b, const Shape& y, GemmParams* p) {
  const int rank = y.rank - 2;
  Shape target;
  target.rank = rank;
  for (int i = 0; i < rank; ++i) target.dims[i] = y.dims[i];
  const auto leading = [](const Shape& shape) {
    Shape s = shape;
    s.rank -= 2;
    return s;
  };
  int64_t a_strides[kMaxRank], b_strides[kMaxRank];
  (void)broadcast_strides(leading(a.shape), target, a_strides);  // checked by infer_shapes
  (void)broadcast_strides(leading(b.shape), target, b_strides);
  const int64_t a_matrix = a.shape[-1] * a.shape[-2], b_matrix = b.shape[-1] * b.shape[-2];
  p->batch = target.size();
  for (int i = 0; i < rank; ++i) {
    if (target.dims[i] == 1) continue;
    const int64_t sa = a_strides[i] * a_matrix, sb = b_strides[i] * b_matrix;
    const int last = p->batch_rank - 1;
    if (last >= 0 && p->a_batch_strides[last] == sa * target.dims[i] && p->b_batch_strides[last] == sb * target.dims[i]) {
      p->batch_dims[last] *= target.dims[i];
      p->a_batch_strides[last] = sa;
      p->b_batch_strides[last] = sb;
    } else {
      p->batch_dims[p->batch_rank] = target.dims[i];
      p->a_batch_strides[p->batch_rank] = sa;
      p->b_batch_strides[p->batch_rank++] = sb;
    }
  }
}

Status bind(const OpArgs& args, GemmParams* p) {
  using namespace gemm_spec;
  const TensorRef& a = args.inputs[input::kA];
  const TensorRef& b = args.inputs[input::kB];
  const TensorRef& bias = args.inputs[input::kBias];
  const TensorRef& residual = args.inputs[input::kResidual];
  const TensorRef& y = args.outputs[output::kY];
  p->a = a.data;
  p->b = b.data;
  p->y = y.data;
  p->dtype = a.dtype;
  p->trans_a = args.attrs[attr::kTransA].i != 0;
  p->trans_b = args.attrs[attr::kTransB].i != 0;
  p->alpha = args.attrs[attr::kAlpha].f;
  p->beta = args.attrs[attr::kBeta].f;
  p->activation = static_cast<Activation>(args.attrs[attr::kActivation].i);
  p->precision = static_cast<Precision>(args.attrs[attr::kPrecision].i);
  p->packed_b = args.packed_input(input::kB);
  p->m = y.shape[-2];
  p->n = y.shape[-1];
  p->k = a.shape[p->trans_a ? -2 : -1];
  p->lda = a.shape[-1];
  p->ldb = b.shape[-1];
  bind_batch(a, b, y.shape, p);
  if (residual.present()) {
    if (!(residual.shape == y.shape)) return Status::invalid("residual", "must have the shape of y; its rank is {}, that of y {}", {residual.shape.rank, y.shape.rank});
    p->residual = residual.data;
  }
  if (bias.present() && p->beta != 0.0F) {  // as in BLAS, a bias times zero is not read
    Shape matrix;
    matrix.rank = 2;
    matrix.dims[0] = p->m;
    matrix.dims[1] = p->n;
    int64_t strides[kMaxRank];
    if (!broadcast_strides(bias.shape, matrix, strides)) {
      return Status::invalid("bias", "does not broadcast to ({}, {})", {p->m, p->n});
    }
    p->bias = bias.data;
    p->bias_stride_m = strides[0];
    p->bias_stride_n = strides[1];
  }
  // A batch that only a has is more rows of one product.
  if (p->batch_rank == 1 && p->b_batch_strides[0] == 0 && !p->trans_a && p->bias_stride_m == 0 && p->a_batch_strides[0] == p->m * p->lda) {
    p->m *= p->batch;
    p->batch = 1;
    p->batch_rank = 0;
  }
  return {};
}

bool supports_any(const GemmParams&, const DeviceInfo&) { return true; }

#if ORTPLUGINS_WITH_CUDA
bool supports_half(const GemmParams& p, const DeviceInfo& device) { return device.sm >= 80 && p.dtype != DType::kFloat32; }
bool supports_float(const GemmParams& p, const DeviceInfo& device) { return device.sm >= 80 && p.dtype == DType::kFloat32; }
int64_t tiles(const GemmParams& p, int64_t block_m, int64_t block_n) {
  return ((p.m + block_m - 1) / block_m) * ((p.n + block_n - 1) / block_n) * p.batch;
}
// Rounds of tiles over the multiprocessors; a tile of 256 x 128 is four of 128 x 64, and 5 % faster, but pairs of blocks may
// share the last of the smaller ones. H200, us, 128 x 64 and 256 x 128: 4096 x 4096 x 4096 2930 and 2730; 1024 x 4096 x 768 165
// and 151; 1024 x 3264 x 768 148 and 157.
bool suits_simt_256(const GemmParams& p, const DeviceInfo& device) {
  const auto rounds = [&](int64_t blocks) { return (blocks + device.sm_count - 1) / device.sm_count; };
  return 160 * rounds(tiles(p, 256, 128)) <= 21 * rounds(2 * tiles(p, 128, 64));
}
// Below one tile for each multiprocessor those of 64 x 64 share the work better, though a thread reads shared memory more often.
// H200, their time relative to 128 x 64: 1024 x 768 x 768 0.82, 1024 x 768 x 3072 0.87, 1024 x 3072 x 768 1.11, 4096 x 768 x 768
// 1.13.
bool suits_simt_128(const GemmParams& p, const DeviceInfo& device) { return p.m > 64 && 10 * tiles(p, 128, 64) >= 9 * device.sm_count; }
// Less exact arithmetic only where the node asks for it.
bool supports_tf32(const GemmParams& p, const DeviceInfo& device) { return supports_float(p, device) && p.precision == Precision::kTf32; }
bool supports_tf32x3(const GemmParams& p, const DeviceInfo& device) { return supports_float(p, device) && p.precision == Precision::kTf32x3; }
#endif

#if ORTPLUGINS_WITH_SM90A
// TMA has 32-bit coordinates; a batch is one more of them, so it must advance by one stride.
bool fits_tma(const GemmParams& p) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  return p.m <= kMost && p.n <= kMost && p.k <= kMost && p.k > 0 && p.batch <= kMost && p.batch_rank <= 1 &&
         tiles(p, 128, 128) <= kMost / 8;  // tiles are counted in 32 bits, times up to 8 blocks of a cluster
}
// It also wants 16-byte aligned rows.
bool supports_wgmma(const GemmParams& p, const DeviceInfo& device) {
  const auto aligned = [](const void* x, int64_t ld) { return reinterpret_cast<uintptr_t>(x) % 16 == 0 && ld % 8 == 0; };
  return device.sm == 90 && p.dtype != DType::kFloat32 && fits_tma(p) && aligned(p.a, p.lda) && aligned(p.b, p.ldb);
}
// The same for float32 as it is, in the one layout that is needed: constant weights are stored (k, n). Four columns of y at a time.
bool supports_wgmma_float(const GemmParams& p, const DeviceInfo& device) {
  const auto aligned = [](const void* x, int64_t ld) { return reinterpret_cast<uintptr_t>(x) % 16 == 0 && ld % 4 == 0; };
  return device.sm == 90 && fits_tma(p) && !p.trans_a && !p.trans_b && aligned(p.a, p.lda) && aligned(p.b, p.ldb) && aligned(p.y, p.n) &&
         aligned(p.residual, p.n) && (p.bias == nullptr || p.bias_stride_m == 0);
}
bool supports_wgmma_tf32(const GemmParams& p, const DeviceInfo& device) { return supports_tf32(p, device) && supports_wgmma_float(p, device); }
bool supports_wgmma_tf32x3(const GemmParams& p, const DeviceInfo& device) { return supports_tf32x3(p, device) && supports_wgmma_float(p, device); }
bool supports_scaled_tf32x3(const GemmParams& p, const DeviceInfo& device) { return device.sm == 90 && supports_tf32x3(p, device) && fits_tma(p); }
bool supports_scaled_tf32(const GemmParams& p, const DeviceInfo& device) { return device.sm == 90 && supports_tf32(p, device) && fits_tma(p); }

bool supports_sm90_float(const GemmParams& p, const DeviceInfo& device) { return device.sm == 90 && p.dtype == DType::kFloat32; }

// TMA brings b once, and all rows of a with it.
bool supports_skinny(const GemmParams& p, const DeviceInfo& device) {
  const int64_t pack = 16 / static_cast<int64_t>(size_of(p.dtype));
  const auto aligned = [pack](const void* x, int64_t ld) { return reinterpret_cast<uintptr_t>(x) % 16 == 0 && ld % pack == 0; };
  return device.sm == 90 && p.m <= 16 && p.batch == 1 && fits_tma(p) && !p.trans_a && aligned(p.a, p.lda) && aligned(p.b, p.ldb);
}

// Sums stay in registers for all of k; tiles of 64 x 64 are counted in 32 bits.
bool fits_small(const GemmParams& p, const DeviceInfo& device) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return device.sm == 90 && !p.trans_a && p.k <= 128 && p.m < kMost && p.n < kMost && p.batch < kMost && tiles(p, 64, 64) < kMost;
}
bool supports_small(const GemmParams& p, const DeviceInfo& device) { return fits_small(p, device) && p.dtype == DType::kFloat32; }
bool supports_small_half(const GemmParams& p, const DeviceInfo& device) { return fits_small(p, device) && p.dtype != DType::kFloat32; }
bool supports_small_tf32(const GemmParams& p, const DeviceInfo& device) { return supports_small(p, device) && p.precision == Precision::kTf32; }
bool supports_small_tf32x3(const GemmParams& p, const DeviceInfo& device) { return supports_small(p, device) && p.precision == Precision::kTf32x3; }
// Products of few tiles. H200, us, this, the best of the other rows and cuBLAS:
//                        ieee           tf32x3          tf32
//   264 x  64 x 64 x 64     9  10   9     8  11   9     7  11   7
//  4096 x  64 x 64 x 64    67  94  82    66 135  82    53 142  52
//  4096 x  64 x 64 x 128  121 141 131   113 190 130    88 172  83
//   512 x 128 x 128 x 64   41  50  43    40  41  42    25  29  24
//    96 x 512 x 64 x 64    17  20  20    16  28  20    12  22  11
//    66 x  64 x 64 x 64     7   7   6     7   7   6     5   7   5
bool suits_small_mma(const GemmParams& p, const DeviceInfo&) { return tiles(p, 64, 64) <= (p.k <= 64 ? 8 : 1) * p.batch; }
// 16-bit elements, us, this and wgmma: 528 x 64 x 64 x 64 8.2 and 7.6, 4096 x 64 x 64 x 64 32 and 40, 512 x 128 x 128 x 64 19 and 23.
bool suits_small_half(const GemmParams& p, const DeviceInfo& device) {
  return suits_small_mma(p, device) && (tiles(p, 64, 64) >= 8 * device.sm_count || !supports_wgmma(p, device));
}
bool suits_small(const GemmParams& p, const DeviceInfo& device) { return suits_small_mma(p, device) && tiles(p, 64, 64) >= 2 * device.sm_count; }

// Cycles of a wide tile: a step of k takes 4 for each column, 3 % more where the tile is narrower and reads L2 more often;
// the epilogue about 12 for each column. Pairs of multiprocessors work on pairs of tiles, round by round.
double wide_cycles(const GemmParams& p, const DeviceInfo& device, int64_t block_n) {
  const int64_t pairs = tiles(p, 256, block_n), at_once = device.sm_count / 2;
  const double step = 4.0 * static_cast<double>(block_n) * (block_n < 256 ? 1.03 : 1.0);
  return static_cast<double>((pairs + at_once - 1) / at_once) * (static_cast<double>((p.k + 63) / 64) * step + 12.0 * static_cast<double>(block_n));
}
// Wide tiles, while half of the multiprocessors or more have one. H200, float16 with gelu, us, 128 x 256, 128 x 192, 128 x 128,
// 64 x 64: 4096 x 4096 x 4096 183, 208, -, -; 4096 x 2304 x 768 42, 32, -, -; 1024 x 2304 x 768 14, 12, 19, 16;
// 1024 x 1024 x 1024 14, 11, 9, 9; 1024 x 768 x 3072 36, 28, 14, 15; 1024 x 768 x 768 16, 12, 8, 7; 128 x 768 x 768 15, 12, 7, 4.
bool suits_wide(const GemmParams& p, const DeviceInfo& device, int64_t block_n) {
  return p.m > 128 && p.n > 128 && 4 * tiles(p, 256, block_n) >= device.sm_count;  // small products would leave tiles empty
}
bool suits_256(const GemmParams& p, const DeviceInfo& device) { return suits_wide(p, device, 256) && wide_cycles(p, device, 256) <= wide_cycles(p, device, 192); }
bool suits_192(const GemmParams& p, const DeviceInfo& device) { return suits_wide(p, device, 192); }
// Tiles of 64 x 64 fill the GPU and have short prologues and epilogues, but read each operand twice as often as 128 x 128: up
// to about 30 steps of k on each multiprocessor.
bool suits_64(const GemmParams& p, const DeviceInfo& device) { return tiles(p, 64, 64) * ((p.k + 63) / 64) <= 32 * device.sm_count; }
// A tile of 128 x 64 for each multiprocessor, or for more than half: it reads operands less often than two of 64 x 64, and nobody
// waits for other layers. With fewer tiles, too, where 64 x 64 would read too often; up to about 40 steps of k, as 128 x 128 reads
// less often still. H200, float16, us, 128 x 64, 64 x 64, 128 x 128: 1024 x 1024 x 1024 6.3, 6.5, 7.8; 1024 x 768 x 768 5.7, 5.9,
// 7.0; 1024 x 768 x 3072 with gelu 12.8, 15.1, 13.3; 128 x 4096 x 4096 12.7, 14.4, 21.9; 512 x 768 x 3072 9.1, 9.1, 10.2;
// 640 x 640 x 640 4.8, 4.3, 6.2; 1024 x 1024 x 4096 18.7, 23.5, 16.8.
bool suits_128x64(const GemmParams& p, const DeviceInfo& device) {
  const int64_t count = tiles(p, 128, 64), sm_count = device.sm_count;
  return p.m >= 128 && count <= sm_count && count * ((p.k + 63) / 64) <= 40 * sm_count && (2 * count > sm_count || !suits_64(p, device));
}
double products(const GemmParams& p) { return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) * static_cast<double>(p.batch); }
// Five launches and the scaling of both operands, against mma.sync at a quarter of the rate: 128 x 768 x 768 31 us and 98 us,
// 4096 x 4096 x 4096 715 us and 3904 us.
bool suits_scaled(const GemmParams& p, const DeviceInfo&) { return (p.m > 64 || p.n > 64) && products(p) >= 1 << 24; }
// wgmma in tf32 needs one launch, but for three products six times the tensor core's time. H200, us: 1024 x 768 x 768 32 and 25,
// 1024 x 1024 x 1024 34 and 32, 1024 x 3072 x 768 57 and 93, 128 x 768 x 3072 65 and 19.
bool suits_scaled_tf32x3(const GemmParams& p, const DeviceInfo& device) {
  return suits_scaled(p, device) && (products(p) >= 1.1e9 || !supports_wgmma_tf32x3(p, device));
}
// For one product twice the time, and half of shared memory's bandwidth for each operand; large cubes are worth the scaling.
// 4096 x 4096 x 4096 337 and 425, 2048 x 2048 x 2048 63 and 57, 16384 x 3072 x 768 334 and 321, 4096 x 768 x 3072 98 and 76.
bool suits_scaled_tf32(const GemmParams& p, const DeviceInfo& device) {
  const bool large = p.k >= 2048 && p.m * p.n >= 2000 * (p.m + p.n);
  return suits_scaled(p, device) && (large || !supports_wgmma_tf32(p, device));
}
// wgmma with an operand in registers waits for that: a multiprocessor wants two warpgroups. Where tiles are that few, they share
// one. H200, us, two warpgroups and one: 1024 x 768 x 3072 22.7 and 26.7, 1024 x 768 x 768 11.0 and 11.6, 1024 x 1024 x 1024 12.8
// and 13.5, 1024 x 2304 x 768 29 and 23, 128 x 3072 x 768 9.9 and 9.5.
bool suits_tf32_pair(const GemmParams& p, const DeviceInfo& device) {
  const int64_t count = tiles(p, 128, 128);
  return 2 * count <= device.sm_count && 4 * count > device.sm_count;
}
#endif

constexpr Variant<GemmParams> kGemmVariants[] = {
#if ORTPLUGINS_WITH_SM90A
    {112, "sm90a_stream_16x64x64_s2", DeviceKind::kCuda, supports_skinny, launch_gemm_sm90a_skinny},
    {134, "sm90a_small_mma_64x64x64_s2", DeviceKind::kCuda, supports_small_half, launch_gemm_sm90a_small_half, nullptr, suits_small_half},
    {109, "sm90a_wgmma_128x256x64_s4", DeviceKind::kCuda, supports_wgmma, launch_gemm_sm90a_128x256, nullptr, suits_256},
    {111, "sm90a_wgmma_128x192x64_s4", DeviceKind::kCuda, supports_wgmma, launch_gemm_sm90a_128x192, nullptr, suits_192},
    {135, "sm90a_wgmma_128x64x64", DeviceKind::kCuda, supports_wgmma, launch_gemm_sm90a_split_128x64, nullptr, suits_128x64},
    {117, "sm90a_wgmma_64x64x64", DeviceKind::kCuda, supports_wgmma, launch_gemm_sm90a_split_64x64, nullptr, suits_64},
    {116, "sm90a_wgmma_128x128x64", DeviceKind::kCuda, supports_wgmma, launch_gemm_sm90a_split_128x128},
    {131, "sm90a_small_tf32x3_64x64x32_s2", DeviceKind::kCuda, supports_small_tf32x3, launch_gemm_sm90a_small_tf32x3, nullptr, suits_small_mma},
    {132, "sm90a_small_tf32_64x64x32_s2", DeviceKind::kCuda, supports_small_tf32, launch_gemm_sm90a_small_tf32, nullptr, suits_small_mma},
    {107, "sm90a_fp16x3_128x128x64_s3", DeviceKind::kCuda, supports_scaled_tf32x3, launch_gemm_sm90a_fp16x3, gemm_sm90a_fp16x3_workspace_bytes, suits_scaled_tf32x3},
    {106, "sm90a_fp16_128x256x64_s4", DeviceKind::kCuda, supports_scaled_tf32, launch_gemm_sm90a_fp16, gemm_sm90a_fp16_workspace_bytes, suits_scaled_tf32},
    {115, "sm90a_tf32x3_64x128x32", DeviceKind::kCuda, supports_wgmma_tf32x3, launch_gemm_sm90a_tf32x3},
    {125, "sm90a_tf32_128x128x64", DeviceKind::kCuda, supports_wgmma_tf32, launch_gemm_sm90a_tf32_pair, nullptr, suits_tf32_pair},
    {114, "sm90a_tf32_128x128x32", DeviceKind::kCuda, supports_wgmma_tf32, launch_gemm_sm90a_tf32},
#endif
#if ORTPLUGINS_WITH_CUDA
    {105, "sm80_mma_128x128x32_s4", DeviceKind::kCuda, supports_half, launch_gemm_sm80_mma},
    {104, "sm80_tf32_128x128x16_s4", DeviceKind::kCuda, supports_tf32, launch_gemm_sm80_tf32},
    {103, "sm80_tf32x3_128x128x16_s4", DeviceKind::kCuda, supports_tf32x3, launch_gemm_sm80_tf32x3},
#endif
#if ORTPLUGINS_WITH_SM90A
    {133, "sm90a_small_simt_64x64x32_s2", DeviceKind::kCuda, supports_small, launch_gemm_sm90a_small, nullptr, suits_small},
    {122, "sm90a_simt_256x128x16_s4", DeviceKind::kCuda, supports_sm90_float, launch_gemm_sm90a_simt, nullptr, suits_simt_256},
#endif
#if ORTPLUGINS_WITH_CUDA
    {124, "simt_128x64x16_s3", DeviceKind::kCuda, supports_float, launch_gemm_simt_128x64, nullptr, suits_simt_128},
    {121, "simt_64x64x16_s4", DeviceKind::kCuda, supports_float, launch_gemm_simt_64x64},
#endif
    {3, "cpu_avx512", DeviceKind::kCpu, supports_isa<GemmParams, CpuIsa::kAvx512>, launch_gemm_cpu_avx512},
    {2, "cpu_avx2", DeviceKind::kCpu, supports_isa<GemmParams, CpuIsa::kAvx2>, launch_gemm_cpu_avx2},
    {1, "cpu_generic", DeviceKind::kCpu, supports_any, launch_gemm_cpu_generic},
};

using Functions = OpFunctions<GemmParams, gemm_spec::kSpec, bind, kGemmVariants>;

// A constant b: only its own shape and the attributes are known.
struct ConstantB {
  const TensorRef* tensor;
  bool trans;
  int64_t batch, k, n;
};

ConstantB constant_b(const OpArgs& args) {
  const TensorRef& b = args.inputs[gemm_spec::input::kB];
  const bool trans = args.attrs[gemm_spec::attr::kTransB].i != 0;
  return {&b, trans, b.shape.product(0, b.shape.rank - 2), b.shape[trans ? -1 : -2], b.shape[trans ? -2 : -1]};
}

int64_t prepack_bytes(const OpArgs& args, int input, const DeviceInfo& device) {
  if (input != gemm_spec::input::kB || device.kind != DeviceKind::kCpu || args.inputs[input].shape.rank < 2) return 0;
  const ConstantB b = constant_b(args);
  switch (device.isa) {
    case CpuIsa::kAvx512: return packed_gemm_b_bytes_cpu_avx512(b.batch, b.k, b.n);
    case CpuIsa::kAvx2: return packed_gemm_b_bytes_cpu_avx2(b.batch, b.k, b.n);
    case CpuIsa::kGeneric: return packed_gemm_b_bytes_cpu_generic(b.batch, b.k, b.n);
  }
  return 0;
}

void prepack(const OpArgs& args, int, const DeviceInfo& device, void* packed) {
  const ConstantB b = constant_b(args);
  const auto pack = device.isa == CpuIsa::kAvx512 ? pack_gemm_b_cpu_avx512
                    : device.isa == CpuIsa::kAvx2 ? pack_gemm_b_cpu_avx2
                                                  : pack_gemm_b_cpu_generic;
  pack(b.tensor->data, b.tensor->dtype, b.trans, b.batch, b.k, b.n, packed);
}

}  // namespace

Status gemm(const GemmParams& params, const ExecContext& context, int variant_id) {
  return Functions::run(params, context, variant_id);
}

const Op& gemm_op() {
  static constexpr Op op = [] {
    Op o = Functions::make();
    o.prepack_bytes = prepack_bytes;
    o.prepack = prepack;
    return o;
  }();
  return op;
}

}  // namespace ortplugins
