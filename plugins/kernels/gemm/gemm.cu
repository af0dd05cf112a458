// Gemm in plain float32 arithmetic (FFMA).
//
// simt_256x128x8_s4, simt_128x128x8_s4: a block of 256 threads computes 256 x 128 or 128 x 128 of y, a thread 16 x 8 or 8 x 8
// in quads of 4 x 4: of the larger tile shared memory is read less, of the smaller there are more. Both operands lie in shared memory as (k, m) and (k, n), so that a thread's fragments are float4; an operand that is stored along k
// is transposed on the way by 4-byte cp.async, one that is stored along m or n comes in 16-byte pieces.
// simt_64x64x16: 64 x 64 with 4 x 4 a thread, any type and layout; elements pass through registers and become float.
#include "device/cp_async.h"
#include "device/tile_copy.h"
#include "kernels/gemm/gemm_cuda.h"

namespace ortplugins {
namespace {

template <int kBlockMValue>
struct SimtConfig {
  static constexpr int kBlockM = kBlockMValue, kBlockN = 128, kBlockK = 8;
  static constexpr int kStages = 4;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = kBlockM == 128 ? 2 : 1;  // on a multiprocessor
  // Warps stand 2 x 4, and a thread's quads are 32 rows and 16 columns apart.
  static constexpr int kWarpM = kBlockM / 2, kQuadsM = kWarpM / 32, kQuadsN = 2;
  // A row of shared memory: the elements of one k, and 4 of padding. 8 lanes along k and 4 along m that transpose write to
  // 32 different banks, and rows stay 16-byte aligned for float4.
  static constexpr int kBytesA = kBlockK * (kBlockM + 4) * 4, kBytesB = kBlockK * (kBlockN + 4) * 4;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  using TileC = EpilogueTile<kBlockM, kBlockN, kThreads>;
  static constexpr int kSmemBytes = kStages * kStageBytes > TileC::kBytes ? kStages * kStageBytes : TileC::kBytes;
};

// Brings 8 x kMajor of an operand to shared memory as (k, m), 256 threads together.
template <int kMajor, bool kAlongK>
class SimtCopy {
  static constexpr int kBlockK = 8, kRow = kMajor + 4;
  static constexpr int kCopies = kAlongK ? kMajor / 32 : kMajor / 128;

 public:
  // `base` is the first element of the block's rows, `major` how many rows of m or n there are from it.
  __device__ __forceinline__ SimtCopy(const float* base, int64_t ld, int64_t major, int64_t k) : left_(k) {
    const int thread_idx = static_cast<int>(threadIdx.x);
    if (kAlongK) {  // element (m, k) of rows thread / 8 + 32 i: a warp reads 32 bytes of each of 4 rows
      k_idx_ = thread_idx % 8;
      const int row = thread_idx / 8;
      source_ = base + row * ld + k_idx_;
      target_ = (k_idx_ * kRow + row) * 4;
      step_ = 32 * ld;
      advance_ = kBlockK;
      const int64_t rest = major - row;
      count_ = rest <= 0 ? 0 : rest < kMajor ? static_cast<int>((rest + 31) / 32) : kCopies;
    } else {  // 16-byte chunks, 128 elements apart: a warp reads a row
      k_idx_ = thread_idx / 32;
      const int col = thread_idx % 32 * 4;
      source_ = base + k_idx_ * ld + col;
      target_ = (k_idx_ * kRow + col) * 4;
      step_ = row_alignment(base, ld);
      advance_ = kBlockK * ld;
      const int64_t rest = major - col;
      count_ = rest <= 0 ? 0 : rest < kMajor ? static_cast<int>(rest) : kMajor;
    }
  }

  __device__ __forceinline__ void copy_and_advance(uint32_t smem) {
    const bool k_exists = k_idx_ < left_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (kAlongK) {
        cp_async_4(smem + target_ + 128 * i, source_ + i * step_, k_exists && i < count_ ? 4 : 0);
      } else {
        const int rest = count_ - 128 * i;
        copy_chunk(smem + target_ + 512 * i, source_ + 128 * i, !k_exists || rest <= 0 ? 0 : rest < 4 ? 4 * rest : 16, static_cast<int>(step_));
      }
    }
    source_ += advance_;
    left_ -= kBlockK;
  }

 private:
  const float* source_;
  int64_t step_;  // between this thread's rows; of the other layout the alignment
  int64_t advance_, left_;
  int k_idx_, target_;
  int count_;  // rows, or elements from the first chunk on, that exist
};

// With more than one part of k each block leaves its sums in `partial`, (part, batch, m, n).
struct SplitK {
  int parts = 1;
  float* partial = nullptr;
};

template <int kBlockM, bool kTransA, bool kTransB>
__global__ void __launch_bounds__(SimtConfig<kBlockM>::kThreads, SimtConfig<kBlockM>::kBlocks)
gemm_simt_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ SplitK split) {
  using C = SimtConfig<kBlockM>;
  constexpr int kRowA = C::kBlockM + 4, kRowB = C::kBlockN + 4;
  constexpr int kThreadM = 4 * C::kQuadsM, kThreadN = 4 * C::kQuadsN;
  extern __shared__ __align__(128) char smem_generic[];
  const uint32_t smem = smem_address(smem_generic);
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
  // Lanes stand 8 x 4; neighbouring lanes are interleaved over m and n so that the float4 reads of eight lanes touch few
  // different words.
  const int thread_m = warp_idx / 4 * C::kWarpM + (lane_idx >> 1 & 7) * 4;
  const int thread_n = warp_idx % 4 * 32 + ((lane_idx & 1) | (lane_idx >> 3 & 2)) * 4;
  const int64_t tiles_m = (p.m + C::kBlockM - 1) / C::kBlockM, tiles_n = (p.n + C::kBlockN - 1) / C::kBlockN;
  const unsigned part = blockIdx.x % split.parts;
  const int64_t all_k_tiles = (p.k + C::kBlockK - 1) / C::kBlockK;
  const int64_t k_begin = all_k_tiles * part / split.parts, k_tiles = all_k_tiles * (part + 1) / split.parts - k_begin;

  const int64_t batch_idx = gemm_batch_index();
  if (batch_idx >= p.batch) return;
  GemmOperands<float> operands(p, batch_idx);
  const TileIndex tile = grouped_tile(blockIdx.x / split.parts, static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n));
  const int64_t first_m = tile.m * C::kBlockM, first_n = tile.n * C::kBlockN;

  // Prologue: fill all stages but one.
  const int64_t first_k = k_begin * C::kBlockK;
  SimtCopy<C::kBlockM, !kTransA> copy_a(operands.a + (kTransA ? first_k * p.lda + first_m : first_m * p.lda + first_k), p.lda, p.m - first_m, p.k - first_k);
  SimtCopy<C::kBlockN, kTransB> copy_b(operands.b + (kTransB ? first_n * p.ldb + first_k : first_k * p.ldb + first_n), p.ldb, p.n - first_n, p.k - first_k);
  for (int stage = 0; stage < C::kStages - 1; ++stage) {
    if (stage < k_tiles) {
      copy_a.copy_and_advance(smem + stage * C::kStageBytes);
      copy_b.copy_and_advance(smem + stage * C::kStageBytes + C::kBytesA);
    }
    cp_async_commit();
  }

  // Mainloop. Empty groups keep the count where there is no tile left to copy.
  float acc[kThreadM][kThreadN] = {};
  int stage = 0, free_stage = C::kStages - 1;
  for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
    cp_async_wait<C::kStages - 2>();
    __syncthreads();  // the tile has arrived for all threads, and all are done with the stage that is filled next
    if (k_tile + C::kStages - 1 < k_tiles) {
      copy_a.copy_and_advance(smem + free_stage * C::kStageBytes);
      copy_b.copy_and_advance(smem + free_stage * C::kStageBytes + C::kBytesA);
    }
    cp_async_commit();
    const auto* sA = reinterpret_cast<const float*>(smem_generic + stage * C::kStageBytes);
    const auto* sB = reinterpret_cast<const float*>(smem_generic + stage * C::kStageBytes + C::kBytesA);
    float rA[2][kThreadM], rB[2][kThreadN];  // double-buffered over k
    const auto load = [&](int buffer, int k) {
#pragma unroll
      for (int quad = 0; quad < C::kQuadsM; ++quad) {
        *reinterpret_cast<float4*>(&rA[buffer][4 * quad]) = *reinterpret_cast<const float4*>(sA + k * kRowA + thread_m + 32 * quad);
      }
#pragma unroll
      for (int quad = 0; quad < C::kQuadsN; ++quad) {
        *reinterpret_cast<float4*>(&rB[buffer][4 * quad]) = *reinterpret_cast<const float4*>(sB + k * kRowB + thread_n + 16 * quad);
      }
    };
    load(0, 0);
#pragma unroll
    for (int k = 0; k < C::kBlockK; ++k) {
      if (k + 1 < C::kBlockK) load((k + 1) & 1, k + 1);
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) acc[i][j] = fmaf(rA[k & 1][i], rB[k & 1][j], acc[i][j]);
      }
    }
    free_stage = stage;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }

  // Epilogue: the stages become the tile of y.
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreadM; ++i) {
    const int row = thread_m + i / 4 * 32 + i % 4;
#pragma unroll
    for (int j = 0; j < kThreadN; j += 4) C::TileC::put(smem_generic, row, thread_n + 4 * j, make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]));
  }
  __syncthreads();
  if (split.parts > 1) {
    operands.epilogue.alpha = 1.0F;
    operands.epilogue.bias = operands.epilogue.residual = nullptr;
    operands.epilogue.y = split.partial + (part * p.batch + batch_idx) * p.m * p.n;
    operands.epilogue.activation = Activation::kNone;
  }
  C::TileC::store(smem_generic, operands.epilogue, first_m, first_n);
}

// Adds up the parts, always in their order, and finishes y. A thread takes one element after the other.
__global__ void __launch_bounds__(256) gemm_add_parts_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ SplitK split) {
  const int64_t count = p.batch * p.m * p.n;
  for (int64_t i = blockIdx.x * 256 + static_cast<int>(threadIdx.x); i < count; i += static_cast<int64_t>(gridDim.x) * 256) {
    const int64_t row = i / p.n, col = i - row * p.n;
    float sum = 0.0F;
#pragma unroll 4
    for (int part = 0; part < split.parts; ++part) sum += split.partial[part * count + i];
    float v = p.alpha * sum;
    if (p.bias != nullptr) v += p.beta * static_cast<const float*>(p.bias)[row % p.m * p.bias_stride_m + col * p.bias_stride_n];
    if (p.residual != nullptr) v += static_cast<const float*>(p.residual)[i];
    static_cast<float*>(p.y)[i] = activate(v, p.activation);
  }
}

struct SmallSimtConfig {
  static constexpr int kBlock = 64, kBlockK = 16;
  static constexpr int kThreads = 256;
  static constexpr int kRow = kBlock + 4;
  static constexpr int kPerThread = kBlock * kBlockK / kThreads;
  using TileC = EpilogueTile<kBlock, kBlock, kThreads, 1>;
};

// Reads this thread's elements of a 64 x kBlockK tile into registers and writes them to shared memory as (k, m).
template <class T>
struct SmallSimtCopy : SmallSimtConfig {
  const T* base;
  int64_t stride_major, stride_k;
  int64_t major_left, k_left;
  float r[kPerThread];

  __device__ __forceinline__ SmallSimtCopy(const T* first, int64_t stride_major, int64_t stride_k, int64_t major_left, int64_t k)
      : base(first), stride_major(stride_major), stride_k(stride_k), major_left(major_left), k_left(k) {}

  // Lanes run along the contiguous dimension.
  __device__ __forceinline__ int2 place(int i) const {
    const int thread_idx = static_cast<int>(threadIdx.x);
    return stride_k == 1 ? make_int2(thread_idx / kBlockK + i * (kThreads / kBlockK), thread_idx % kBlockK)
                         : make_int2(thread_idx % kBlock, thread_idx / kBlock + i * (kThreads / kBlock));
  }
  __device__ __forceinline__ void load_and_advance() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int2 at = place(i);  // (m, k)
      r[i] = at.x < major_left && at.y < k_left ? to_float(base[at.x * stride_major + at.y * stride_k]) : 0.0F;
    }
    base += kBlockK * stride_k;
    k_left -= kBlockK;
  }
  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int2 at = place(i);
      tile[at.y * kRow + at.x] = r[i];
    }
  }
};

template <class T>
__global__ void __launch_bounds__(SmallSimtConfig::kThreads, 2) gemm_simt_64x64_kernel(const __grid_constant__ GemmParams p) {
  using C = SmallSimtConfig;
  constexpr int kTileFloats = C::kBlockK * C::kRow;
  __shared__ __align__(128) float smem[2][2][kTileFloats];  // buffer, operand
  static_assert(sizeof(smem) >= C::TileC::kBytes, "the epilogue reuses it");
  const int thread_m = static_cast<int>(threadIdx.x) / 16 * 4, thread_n = static_cast<int>(threadIdx.x) % 16 * 4;
  const int64_t tiles_m = (p.m + C::kBlock - 1) / C::kBlock, tiles_n = (p.n + C::kBlock - 1) / C::kBlock;
  const int64_t k_tiles = (p.k + C::kBlockK - 1) / C::kBlockK;
  const int64_t a_stride_m = p.trans_a ? 1 : p.lda, a_stride_k = p.trans_a ? p.lda : 1;
  const int64_t b_stride_n = p.trans_b ? p.ldb : 1, b_stride_k = p.trans_b ? 1 : p.ldb;

  const int64_t batch_idx = gemm_batch_index();
  if (batch_idx >= p.batch) return;
  const GemmOperands<T> operands(p, batch_idx);
  const TileIndex tile = grouped_tile(blockIdx.x, static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n));
  const int64_t first_m = tile.m * C::kBlock, first_n = tile.n * C::kBlock;
  SmallSimtCopy<T> copy_a(operands.a + first_m * a_stride_m, a_stride_m, a_stride_k, p.m - first_m, p.k);
  SmallSimtCopy<T> copy_b(operands.b + first_n * b_stride_n, b_stride_n, b_stride_k, p.n - first_n, p.k);
  float acc[4][4] = {};
  copy_a.load_and_advance();  // zeros where k is 0
  copy_b.load_and_advance();
  for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
    // One barrier a tile: whoever is past it has read the buffer that is written in the next round.
    float* const sA = smem[k_tile & 1][0];
    float* const sB = smem[k_tile & 1][1];
    copy_a.store(sA);
    copy_b.store(sB);
    __syncthreads();
    copy_a.load_and_advance();
    copy_b.load_and_advance();
#pragma unroll 8
    for (int k = 0; k < C::kBlockK; ++k) {
      const float4 a = *reinterpret_cast<const float4*>(sA + k * C::kRow + thread_m);
      const float4 b = *reinterpret_cast<const float4*>(sB + k * C::kRow + thread_n);
      const float rA[4] = {a.x, a.y, a.z, a.w}, rB[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(rA[i], rB[j], acc[i][j]);
      }
    }
  }
  __syncthreads();
  char* const tile_c = reinterpret_cast<char*>(smem);
#pragma unroll
  for (int i = 0; i < 4; ++i) C::TileC::put(tile_c, thread_m + i, thread_n, make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
  __syncthreads();
  C::TileC::store(tile_c, operands.epilogue, first_m, first_n);
}

template <int kBlockM>
Status launch_simt(const char* what, const GemmParams& p, const ExecContext& context, const SplitK& split = {}) {
  if (is_empty(p)) return {};
  return dispatch_layout(p, [&](auto trans_a, auto trans_b) {
    using C = SimtConfig<kBlockM>;
    static SmemLimit limit;
    const auto kernel = gemm_simt_kernel<kBlockM, decltype(trans_a)::value, decltype(trans_b)::value>;
    ORTPLUGINS_RETURN_IF_ERROR(limit.raise(kernel, *context.device, C::kSmemBytes));
    dim3 grid = gemm_grid(p, C::kBlockM, C::kBlockN);
    grid.x *= split.parts;
    return launch(what, kernel, grid, C::kThreads, C::kSmemBytes, context, p, split);
  });
}

}  // namespace

Status launch_gemm_simt_256x128(const GemmParams& p, const ExecContext& context) { return launch_simt<256>("gemm_simt_256x128", p, context); }
Status launch_gemm_simt_128x128(const GemmParams& p, const ExecContext& context) { return launch_simt<128>("gemm_simt_128x128", p, context); }

int gemm_simt_split_parts(const GemmParams& p, const DeviceInfo& device) {
  // As many blocks as run at once, two on a multiprocessor, if each keeps 128 of k.
  const int64_t tiles = ceil_div(p.m, 128) * ceil_div(p.n, 128) * p.batch;
  const int64_t room = tiles == 0 ? 1 : 2 * device.sm_count / tiles, steps = p.k / 128;
  const int64_t parts = room < steps ? room : steps;
  return parts < 1 ? 1 : parts > 16 ? 16 : static_cast<int>(parts);
}
int64_t gemm_simt_split_workspace_bytes(const GemmParams& p, const DeviceInfo& device) {
  return 4 * gemm_simt_split_parts(p, device) * p.batch * p.m * p.n;
}
Status launch_gemm_simt_split(const GemmParams& p, const ExecContext& context) {
  const int64_t needed = gemm_simt_split_workspace_bytes(p, *context.device);
  if (context.workspace_bytes < needed) return Status::invalid("workspace", "{} bytes are needed, {} given", {needed, context.workspace_bytes});
  const SplitK split{gemm_simt_split_parts(p, *context.device), static_cast<float*>(context.workspace)};
  ORTPLUGINS_RETURN_IF_ERROR(launch_simt<128>("gemm_simt_split", p, context, split));
  if (split.parts == 1 || is_empty(p)) return {};
  const unsigned grid = grid_size(ceil_div(p.batch * p.m * p.n, 256), 16 * context.device->sm_count);
  return launch("gemm_add_parts", gemm_add_parts_kernel, grid, 256, 0, context, p, split);
}

Status launch_gemm_simt_64x64(const GemmParams& p, const ExecContext& context) {
  if (is_empty(p)) return {};
  return dispatch(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = SmallSimtConfig;
    return launch("gemm_simt_64x64", gemm_simt_64x64_kernel<T>, gemm_grid(p, C::kBlock, C::kBlock), C::kThreads, 0, context, p);
  });
}

}  // namespace ortplugins
