// A tile of y by several blocks (sm_90a): the blocks of a cluster split k in layers, and add up their sums through the shared
// memory of all, each finishing a part of the rows. Operands of products that need this come from DRAM, so stages take all
// shared memory that is free: copies then are about 1.5 us on their way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/dependent_launch.h"
#include "device/dispatch.h"
#include "device/divisor.h"
#include "device/sm90.h"

namespace ortplugins {

// Splits k while `room` blocks are not reached and each keeps three steps.
inline int choose_layers(int64_t tiles, int64_t k_tiles, int64_t room) {
  int layers = 1;
  while (layers < 8 && 2 * layers * tiles <= room && k_tiles >= 2 * layers * 3) layers *= 2;
  return layers;
}

// Stages of shared memory: as many as there is room for with the blocks that share a multiprocessor, `least` at least, and not
// more than a block has steps of k. A stage has two barriers.
inline int choose_stages(int64_t blocks, int most_blocks, int sm_count, int stage_bytes, int other_bytes, int64_t steps, int least) {
  const int64_t shared_by = std::min<int64_t>(most_blocks, ceil_div(blocks, sm_count));
  const int64_t room = (227 * 1024 / shared_by - (shared_by > 1 ? 1024 : 0) - other_bytes) / (stage_bytes + 16);
  return static_cast<int>(std::max<int64_t>(least, std::min(room, steps)));
}

// The tiles of y and the layers of each: block i has layer i % layers of tile i / layers, and tiles go down the columns of y first.
struct LayerGrid {
  int layer_shift = 0, tiles_m, tiles_n, k_tiles;
  Divisor by_tiles_m, by_tiles_n;

  LayerGrid() = default;
  LayerGrid(int layers, int64_t tiles_m_count, int64_t tiles_n_count, int64_t k_tile_count)
      : tiles_m(static_cast<int>(tiles_m_count)), tiles_n(static_cast<int>(tiles_n_count)), k_tiles(static_cast<int>(k_tile_count)),
        by_tiles_m(tiles_m_count), by_tiles_n(tiles_n_count) {
    while ((1 << layer_shift) < layers) ++layer_shift;
  }
};

#if defined(__CUDACC__)

// Stages in shared memory, in number known at run time: the barriers of each, `full` ones first.
struct Ring {
  uint32_t barriers;
  int stages;

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (stages + stage); }

  // How the kernel begins. `prepares` is true for one thread; a stage is empty once `readers` warps say so.
  __device__ __forceinline__ void begin(bool prepares, int readers, const CUtensorMap& a, const CUtensorMap& b) const {
    if (prepares) {
      tma_prefetch(&a);
      tma_prefetch(&b);
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(full(stage), 1);
        mbarrier_init(empty(stage), readers);
      }
      fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
};

// As PipelineState (device/sm90.h), for a Ring.
struct RingState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Which tile and which steps of k a block has.
struct LayerPlace {
  int layer, batch_idx, tile_m, tile_n, k_begin, k_end;

  __device__ __forceinline__ explicit LayerPlace(const LayerGrid& grid) {
    const unsigned index = blockIdx.x >> grid.layer_shift, column = grid.by_tiles_m.quotient(index), batch = grid.by_tiles_n.quotient(column);
    layer = static_cast<int>(blockIdx.x - (index << grid.layer_shift));
    tile_m = static_cast<int>(index) - static_cast<int>(column) * grid.tiles_m;
    tile_n = static_cast<int>(column) - static_cast<int>(batch) * grid.tiles_n;
    batch_idx = static_cast<int>(batch);
    k_begin = grid.k_tiles * layer >> grid.layer_shift;
    k_end = grid.k_tiles * (layer + 1) >> grid.layer_shift;
  }
};

// How the warps of a tile send their sums to the same warps of the cluster's other layers: by bulk copies, of `warp_bytes` for each
// layer, in kBatches parts at most, each of which has a barrier there that tells that those of all layers have come. What comes lies by
// layer, and in that by warp.
template <int kWarps, int kBatches>
struct LayerExchange {
  static constexpr int kBarrierBytes = 8 * kWarps * kBatches;
  uint32_t smem, barriers;  // of the block
  int received;             // offset in shared memory of what comes
  int layer, layers, warp_idx, warp_bytes, batch_bytes;

  // One thread, before Ring::begin.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < kWarps * kBatches; ++i) {
      mbarrier_init(barriers + 8 * i, 1);
      mbarrier_arrive_expect(barriers + 8 * i, batch_bytes * (layers - 1));
    }
  }
  // Where this warp's sums from layer `from` are received by layer `by`: an offset in shared memory.
  __device__ __forceinline__ int place(int from, int by) const {
    return received + ((from - (from > by ? 1 : 0)) * kWarps + warp_idx) * warp_bytes;
  }
  // All lanes have written what the warp sends; that for layer `lane_idx` lies at `source`. Where it may receive, each block has
  // called cluster_arrive_relaxed.
  __device__ __forceinline__ void send(uint32_t source, int lane_idx) const {
    fence_async_proxy();
    cluster_wait();
    if (lane_idx >= layers || lane_idx == layer) return;
    const uint32_t target = smem + place(layer, lane_idx);
    for (int batch = 0, at = 0; at < warp_bytes; ++batch, at += batch_bytes) {
      bulk_copy_to_block(target + at, source + at, batch_bytes, barrier(batch), lane_idx);
    }
  }
  __device__ __forceinline__ void wait(int batch) const { mbarrier_wait(barrier(batch), 0); }
  // Adds up the sums of all layers in their order, `count` pieces of four floats, `piece_bytes` apart. Own ones lie at `own`, those that
  // have come `at` bytes behind their place.
  template <int kCount>
  __device__ __forceinline__ void add_up(float (&v)[kCount], const char* own, const char* smem_generic, int at, int count,
                                         int piece_bytes) const {
#pragma unroll 1
    for (int from = 0; from < layers; ++from) {
      const char* const pieces = from == layer ? own : smem_generic + place(from, layer) + at;
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        if (i >= count) continue;
        const float4 x = *reinterpret_cast<const float4*>(pieces + i * piece_bytes);
        v[4 * i] += x.x;
        v[4 * i + 1] += x.y;
        v[4 * i + 2] += x.z;
        v[4 * i + 3] += x.w;
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int batch) const { return barriers + 8 * (warp_idx * kBatches + batch); }
};

#endif

}  // namespace ortplugins
