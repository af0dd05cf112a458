// float32 attention on scaled float16: how q, k and v are brought to it, and where they lie in the workspace.
//
// A tile of rows of one head is scaled by the power of two that brings its largest magnitude to [2^14, 2^15), and
// x 2^s = hi + lo with hi and lo in float16: 22 bits, down to a floor of 2^-25, that is 2^-39 of the tile's largest.
// The tile's factor 2^-s undoes the scaling. It is NaN where float16 would not do, and whatever meets a NaN is left to
// a kernel that needs no scaling:
//   - some element is infinite or NaN;
//   - of v, some row or column lies so far below the tile's largest element that the floor would show in it.
// For q and k the floor matters only where scores are large: it moves a score by at most 2^-38 scale head_dim max|q|
// max|k|, and an absolute error of a score is a relative one of its weight. The kernel compares that bound for each
// pair of tiles.
#pragma once

#include <cuda_fp16.h>

#include "kernels/attention/attention_device.h"

namespace ortplugins {

constexpr int kScaledTileElements = 8192;  // rows of a tile times the padded head size
constexpr int kRedoRows = 64;              // rows that are done again together: a tile of the kernel without scaling

// One of q, k and v.
struct ScaledTensor {
  __half* parts = nullptr;   // (part, batch, head, row, ld): hi, then lo
  float* factors = nullptr;  // (batch, head, tile)
  int64_t heads = 0;         // of all sequences
  int64_t len = 0, ld = 0;   // ld a multiple of 8; what it pads is zero
  int64_t tiles = 0;
};

// The caller's workspace. Sized and divided here only.
struct ScaledWorkspace {
  ScaledTensor q, k, v;
  int* next = nullptr;      // the first item of work that no block of the kernel has taken
  uint8_t* redo = nullptr;  // (batch, head, tile of kRedoRows, 16 rows): whether they must be done again
  int64_t bytes = 0;

  // `workspace` null: for its size.
  ScaledWorkspace(const AttentionParams& p, int parts, int padded_dim, void* workspace) {
    const int64_t tile_rows = kScaledTileElements / padded_dim;
    const auto take = [&](int64_t size) {
      char* const at = workspace == nullptr ? nullptr : static_cast<char*>(workspace) + bytes;
      bytes += ceil_div(size, 256) * 256;
      return at;
    };
    const auto place = [&](ScaledTensor* t, int64_t heads, int64_t len, int64_t dim) {
      t->heads = p.batch * heads;
      t->len = len;
      t->ld = ceil_div(dim, 8) * 8;
      t->tiles = ceil_div(len, tile_rows);
      t->parts = reinterpret_cast<__half*>(take(parts * t->heads * len * t->ld * static_cast<int64_t>(sizeof(__half))));
      t->factors = reinterpret_cast<float*>(take(t->heads * t->tiles * static_cast<int64_t>(sizeof(float))));
    };
    place(&q, p.heads, p.q_len, p.head_dim);
    place(&k, p.kv_heads, p.total_len(), p.head_dim);
    place(&v, p.kv_heads, p.total_len(), p.v_head_dim);
    next = reinterpret_cast<int*>(take(sizeof(int)));
    redo = reinterpret_cast<uint8_t*>(take(q.heads * ceil_div(p.q_len, kRedoRows) * 4));
  }
};

// Fills the parts and factors of all three, and `next` with `blocks`, as each block has its first item without asking.
// `least`: what the largest element of a row or column of v must reach once scaled.
Status scale_attention(const AttentionLaunch& a, const ScaledWorkspace& workspace, int parts, int padded_dim,
                       float least, int blocks, const ExecContext& context);

// tf32x3 for the tiles of kRedoRows rows with a mark in `redo`; the others keep their y. In attention_tf32_sm80.cu.
Status launch_attention_redo(AttentionLaunch a, const uint8_t* redo, int padded_dim, const ExecContext& context);

}  // namespace ortplugins
