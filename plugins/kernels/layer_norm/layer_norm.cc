#include "kernels/layer_norm/layer_norm.h"

#include "core/op.h"
#include "kernels/layer_norm/variants.h"
#include "op_specs.h"

namespace ortplugins {
namespace {

// Whether `shape`, leading ones aside, is that of the last dimensions of `x`, from one at or after dimension `first`
// on. `size` then is its number of elements.
bool is_tail_of(const Shape& shape, const Shape& x, int first, int64_t* size) {
  if (shape.rank > x.rank) return false;
  int skip = 0;
  while (skip < shape.rank && shape[skip] == 1) ++skip;
  const int rank = shape.rank - skip;
  if (rank > x.rank - first) return false;
  for (int i = 1; i <= rank; ++i) {
    if (shape[-i] != x[-i]) return false;
  }
  *size = x.product(x.rank - rank, x.rank);
  return true;
}

// A tensor with one element for each column, or an absent one.
Status bind_columns(const TensorRef& tensor, const char* name, const Shape& x, int axis, int64_t cols,
                    const void** data) {
  if (!tensor.present()) return {};
  int64_t size = 0;
  if (!is_tail_of(tensor.shape, x, axis, &size) || size != cols) {
    return Status::invalid(name,
                           "has {} elements in {} dimensions, expected the shape of x from axis {} on, which has {}",
                           {tensor.shape.size(), tensor.shape.rank, axis, cols});
  }
  *data = tensor.data;
  return {};
}

Status bind(const OpArgs& args, LayerNormParams* p) {
  using namespace layer_norm_spec;
  const TensorRef& x = args.inputs[input::kX];
  const TensorRef& residual = args.inputs[input::kResidual];
  const Shape& shape = x.shape;
  if (shape.rank < 1) return Status::invalid("x", "needs at least one dimension");
  const int64_t given = args.attrs[attr::kAxis].i;
  if (given < -shape.rank || given >= shape.rank) {
    return Status::invalid("axis", "{} is not in [{}, {}] for this x", {given, -shape.rank, shape.rank - 1});
  }
  const int axis = static_cast<int>(given < 0 ? given + shape.rank : given);
  p->x = x.data;
  p->y = args.outputs[output::kY].data;
  p->sum = args.outputs[output::kSum].present() ? args.outputs[output::kSum].data : nullptr;
  p->dtype = x.dtype;
  p->rows = shape.product(0, axis);
  p->cols = shape.product(axis, shape.rank);
  p->epsilon = args.attrs[attr::kEpsilon].f;
  p->rms = static_cast<Norm>(args.attrs[attr::kNorm].i) == Norm::kRmsNorm;
  ORTPLUGINS_RETURN_IF_ERROR(bind_columns(args.inputs[input::kGamma], "gamma", shape, axis, p->cols, &p->gamma));
  ORTPLUGINS_RETURN_IF_ERROR(bind_columns(args.inputs[input::kBeta], "beta", shape, axis, p->cols, &p->beta));
  ORTPLUGINS_RETURN_IF_ERROR(bind_columns(args.inputs[input::kBias], "bias", shape, axis, p->cols, &p->bias));
  if (!residual.present()) return {};
  int64_t size = 0;
  if (!is_tail_of(residual.shape, shape, 0, &size) || (p->cols != 0 && size % p->cols != 0)) {
    return Status::invalid(
        "residual",
        "has {} elements in {} dimensions, expected the shape of x or of its last dimensions, at least from axis {} on",
        {residual.shape.size(), residual.shape.rank, axis});
  }
  p->residual = residual.data;
  p->residual_rows = p->cols == 0 ? 0 : size / p->cols;
  return {};
}

bool supports_any(const LayerNormParams&, const DeviceInfo&) { return true; }

#if ORTPLUGINS_WITH_CUDA
bool supports_block_reread(const LayerNormParams&, const DeviceInfo& device) { return device.sm >= 80; }
bool supports_warp_per_row(const LayerNormParams& p, const DeviceInfo& device) {
  return device.sm >= 80 &&
         layer_norm_row_packs(p) * 16 <= kLayerNormWarpElements * static_cast<int64_t>(size_of(p.dtype));
}
// Rows of 64 packs or fewer, of half types 128, are faster with a warp each.
bool supports_block_registers(const LayerNormParams& p, const DeviceInfo& device) {
  return device.sm >= 80 && layer_norm_row_packs(p) > (p.dtype == DType::kFloat32 ? 64 : 128) &&
         p.cols <= kLayerNormBlockElements && layer_norm_aligned(p) && p.rows <= 0x7fffffff;
}
// x and the residual come by bulk copies; a bias would have to come otherwise. Rows are counted in 32 bits, with room
// for the largest step. Rows of float32 gain nothing.
bool supports_ring(const LayerNormParams& p, const DeviceInfo& device) {
  return device.sm >= 90 && p.dtype != DType::kFloat32 && layer_norm_aligned(p) && p.bias == nullptr &&
         p.cols <= kLayerNormBlockElements && p.rows <= 0x3fffffff;
}
// As measured on an H200, with enough rows for blocks that stay. Of the speed of a copy, beside that of block_registers:
// 768 columns 0.91 (0.76), 1024 0.89 (0.80), 2048 0.90 (0.85), 4096 0.90 (0.85), 8192 0.90 (0.83), 12288 0.87 (0.73).
// Of that of the sum of two tensors, where there is a residual: 0.96 (0.85), 0.96 (0.88), 0.95 (0.93), 0.89 (0.95),
// 0.90 (0.92), 0.98 (0.89). Where `sum` is written, too, block_registers is faster from 1024 columns on. Few rows, which
// take as long as one of them, are faster in all but the short ones: with a residual 128 x 768 2.4 us (3.7), 1024 x 768
// 4.2 (6.2), 128 x 4096 4.3 (6.5).
bool suits_ring(const LayerNormParams& p, const DeviceInfo& device) {
  const int64_t packs = layer_norm_row_packs(p);
  if (p.rows < 8 * device.sm_count) return packs > 64 || p.residual != nullptr;
  if (packs <= 64) return false;
  if (p.sum != nullptr) return packs <= 96;
  return p.residual == nullptr || packs <= 256 || packs > 1024;
}
bool supports_block_shared(const LayerNormParams& p, const DeviceInfo& device) {
  return device.sm >= 80 && layer_norm_row_packs(p) * 16 <= layer_norm_shared_bytes(device);
}
#endif

constexpr Variant<LayerNormParams> kLayerNormVariants[] = {
#if ORTPLUGINS_WITH_CUDA
    {105, "ring", DeviceKind::kCuda, supports_ring, launch_layer_norm_ring, nullptr, suits_ring},
    {103, "block_registers", DeviceKind::kCuda, supports_block_registers, launch_layer_norm_block_registers},
    {104, "warp_per_row", DeviceKind::kCuda, supports_warp_per_row, launch_layer_norm_warp_per_row},
    {102, "block_shared", DeviceKind::kCuda, supports_block_shared, launch_layer_norm_block_shared},
    {101, "block_reread", DeviceKind::kCuda, supports_block_reread, launch_layer_norm_block_reread},
#endif
    {3, "cpu_avx512", DeviceKind::kCpu, supports_isa<LayerNormParams, CpuIsa::kAvx512>, launch_layer_norm_cpu_avx512},
    {2, "cpu_avx2", DeviceKind::kCpu, supports_isa<LayerNormParams, CpuIsa::kAvx2>, launch_layer_norm_cpu_avx2},
    {1, "cpu_generic", DeviceKind::kCpu, supports_any, launch_layer_norm_cpu_generic},
};

using Functions = OpFunctions<LayerNormParams, layer_norm_spec::kSpec, bind, kLayerNormVariants>;

}  // namespace

Status layer_norm(const LayerNormParams& params, const ExecContext& context, int variant_id) {
  return Functions::run(params, context, variant_id);
}

const Op& layer_norm_op() {
  static constexpr Op op = Functions::make();
  return op;
}

}  // namespace ortplugins
