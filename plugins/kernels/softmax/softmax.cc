#include "kernels/softmax/softmax.h"

#include "core/op.h"
#include "kernels/softmax/variants.h"
#include "op_specs.h"

namespace ortplugins {
namespace {

Status bind(const OpArgs& args, SoftmaxParams* p) {
  using namespace softmax_spec;
  const TensorRef& x = args.inputs[input::kX];
  const TensorRef& mask = args.inputs[input::kMask];
  const Shape& shape = x.shape;
  if (shape.rank < 1) return Status::invalid("x", "needs at least one dimension");
  const int64_t given = args.attrs[attr::kAxis].i;
  if (given < -shape.rank || given >= shape.rank) {
    return Status::invalid("axis", "{} is not in [{}, {}] for this x", {given, -shape.rank, shape.rank - 1});
  }
  const int axis = static_cast<int>(given < 0 ? given + shape.rank : given);
  p->x = x.data;
  p->y = args.outputs[output::kY].data;
  p->dtype = x.dtype;
  p->cols = shape[axis];
  p->inner = shape.product(axis + 1, shape.rank);
  p->rows = shape.product(0, axis) * p->inner;
  p->scale = args.attrs[attr::kScale].f;
  p->log = args.attrs[attr::kLog].i != 0;
  if (!mask.present()) return {};

  int64_t strides[kMaxRank];
  if (!broadcast_strides(mask.shape, shape, strides)) {
    return Status::invalid("mask", "does not broadcast to the shape of x (rank {}, x has rank {})", {mask.shape.rank, shape.rank});
  }
  p->mask = mask.data;
  p->mask_dtype = mask.dtype;
  p->mask_col_stride = strides[axis];
  for (int i = 0; i < shape.rank; ++i) {
    if (i == axis || shape[i] == 1) continue;
    const int last = p->mask_rank - 1;
    if (last >= 0 && p->mask_strides[last] == strides[i] * shape[i]) {
      p->mask_dims[last] *= shape[i];
      p->mask_strides[last] = strides[i];
    } else {
      p->mask_dims[p->mask_rank] = shape[i];
      p->mask_strides[p->mask_rank++] = strides[i];
    }
  }
  return {};
}

bool supports_any(const SoftmaxParams&, const DeviceInfo&) { return true; }

#if ORTPLUGINS_WITH_CUDA
constexpr int64_t kMostRows = 0x7fffffff;  // with a block each

bool supports_strided_online(const SoftmaxParams&, const DeviceInfo& device) { return device.sm >= 80; }
bool supports_block_online(const SoftmaxParams& p, const DeviceInfo& device) { return device.sm >= 80 && p.inner == 1; }
bool supports_warp_per_row(const SoftmaxParams& p, const DeviceInfo& device) {
  return supports_block_online(p, device) && p.cols <= kSoftmaxWarpElements;
}
bool supports_block_registers(const SoftmaxParams& p, const DeviceInfo& device) {
  return supports_block_online(p, device) && p.cols <= kSoftmaxBlockElements && p.rows <= kMostRows;
}
// Longer rows are faster with more threads, if they can be had: 4096x12345 of float32 takes 102 us, not 106.
bool suits_block_registers(const SoftmaxParams& p, const DeviceInfo&) {
  return softmax_row_packs(p) <= 2048 || !softmax_is_plain(p);
}
bool supports_resident(const SoftmaxParams& p, const DeviceInfo& device) {
  const SoftmaxResidentShape shape = softmax_resident_shape(p, device);
  return supports_block_online(p, device) && softmax_is_plain(p) &&
         shape.smem_bytes() <= softmax_shared_bytes(device) && p.rows <= kMostRows / shape.blocks;
}
// These two are for rows that `resident` does not take: those with a mask.
bool supports_block_shared(const SoftmaxParams& p, const DeviceInfo& device) {
  return supports_block_online(p, device) && softmax_row_packs(p) * 16 <= softmax_shared_bytes(device);
}
// Rows that are too long for one block, or long ones that are too few for one block each.
bool supports_cluster_shared(const SoftmaxParams& p, const DeviceInfo& device) {
  const int64_t packs = softmax_row_packs(p), slice = (packs + kSoftmaxClusterBlocks - 1) / kSoftmaxClusterBlocks;
  return supports_block_online(p, device) && device.sm >= 90 && packs >= 2048 &&
         slice * 16 <= softmax_shared_bytes(device) &&
         (2 * p.rows <= device.sm_count || !supports_block_shared(p, device));
}
// Rows that are too long for a cluster, or very long ones that are too few for one cluster each.
bool supports_split(const SoftmaxParams& p, const DeviceInfo& device) {
  return supports_block_online(p, device) && softmax_row_packs(p) >= 8192 && p.rows <= kMostRows / 256 &&
         (p.rows <= 8 || !(supports_resident(p, device) || supports_block_shared(p, device) ||
                           supports_cluster_shared(p, device)));
}
#endif

constexpr Variant<SoftmaxParams> kSoftmaxVariants[] = {
#if ORTPLUGINS_WITH_CUDA
    {105, "warp_per_row", DeviceKind::kCuda, supports_warp_per_row, launch_softmax_warp_per_row},
    {104, "block_registers", DeviceKind::kCuda, supports_block_registers, launch_softmax_block_registers, nullptr,
     suits_block_registers},
    {107, "split", DeviceKind::kCuda, supports_split, launch_softmax_split, softmax_split_workspace},
    {109, "resident", DeviceKind::kCuda, supports_resident, launch_softmax_resident},
    {106, "cluster_shared", DeviceKind::kCuda, supports_cluster_shared, launch_softmax_cluster_shared},
    {103, "block_shared", DeviceKind::kCuda, supports_block_shared, launch_softmax_block_shared},
    {102, "block_online", DeviceKind::kCuda, supports_block_online, launch_softmax_block_online},
    {101, "strided_online", DeviceKind::kCuda, supports_strided_online, launch_softmax_strided_online},
#endif
    {3, "cpu_avx512", DeviceKind::kCpu, supports_isa<SoftmaxParams, CpuIsa::kAvx512>, launch_softmax_cpu_avx512},
    {2, "cpu_avx2", DeviceKind::kCpu, supports_isa<SoftmaxParams, CpuIsa::kAvx2>, launch_softmax_cpu_avx2},
    {1, "cpu_generic", DeviceKind::kCpu, supports_any, launch_softmax_cpu_generic},
};

using Functions = OpFunctions<SoftmaxParams, softmax_spec::kSpec, bind, kSoftmaxVariants>;

}  // namespace

Status softmax(const SoftmaxParams& params, const ExecContext& context, int variant_id) {
  return Functions::run(params, context, variant_id);
}

const Op& softmax_op() {
  static constexpr Op op = Functions::make();
  return op;
}

}  // namespace ortplugins
