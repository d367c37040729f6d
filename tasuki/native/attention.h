// Paged attention of some query rows over one KV head, with online softmax.
//
// A row's result does not depend on the rows beside it, on how the prompt was cut into chunks, or
// on threads: keys are taken in tiles of 64 absolute positions, one after the other; within a tile
// a score adds over dimensions in order, a sum over lanes in a fixed tree, a product with values
// over positions in order; and a position that a row may not see has probability exactly 0.
// Queries arrive scaled by log2(e) / sqrt(head_dim), so that 2 ** x serves for e ** x.
//
// A block holds, for one layer and head, keys as [head_dim, block_size] and values as
// [block_size, head_dim].
#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace tasuki {

constexpr int TILE = 64;
constexpr int GROUPS = TILE / LANES;
constexpr int MOST_ROWS = 6;
constexpr int FEW_ROWS = 12;  // up to so many read a tile where it lies
constexpr int MOST_DIM = 512;

// Where the keys and values of one tile are, in groups of LANES positions.
template <typename S>
struct Tile {
  const S* keys[GROUPS];    // [head_dim][LANES], rows `key_stride` apart
  const S* values[GROUPS];  // [LANES][head_dim], rows `value_stride` apart
  int64_t key_stride, value_stride;
};

// The blocks of one request, seen from one layer and KV head.
template <typename T>
struct Blocks {
  const T* keys;    // of block 0
  const T* values;  // of block 0
  int64_t stride;   // elements from one block to the next
  const int64_t* table;
  int64_t block_size, head_dim, padded_dim, num_blocks;  // num_blocks: of the table

  // As they lie: needs whole lanes in both directions.
  bool direct() const { return block_size % LANES == 0 && head_dim % LANES == 0; }

  Tile<T> tile(int64_t number) const {
    Tile<T> tile{{}, {}, block_size, head_dim};
    for (int group = 0; group < GROUPS; ++group) {
      const int64_t position = number * TILE + group * LANES;
      // what lies beyond the table is masked; its first block stands in
      const int64_t index = position / block_size < num_blocks ? position / block_size : 0;
      const int64_t base = table[index] * stride, offset = position % block_size;
      tile.keys[group] = keys + base + offset;
      tile.values[group] = values + base + offset * head_dim;
    }
    return tile;
  }

  // The same as float32 in whole lanes, for odd block sizes and head dimensions.
  Tile<float> packed(int64_t number, float* buffer) const {
    float *key_buffer = buffer, *value_buffer = buffer + padded_dim * TILE;
    std::fill(buffer, buffer + 2 * padded_dim * TILE, 0.0f);
    for (int64_t j = 0; j < TILE; ++j) {
      const int64_t index = (number * TILE + j) / block_size;
      if (index >= num_blocks) break;
      const int64_t base = table[index] * stride, offset = (number * TILE + j) % block_size;
      for (int64_t dim = 0; dim < head_dim; ++dim) {
        key_buffer[dim * TILE + j] = to_float(keys[base + dim * block_size + offset]);
        value_buffer[j * padded_dim + dim] = to_float(values[base + offset * head_dim + dim]);
      }
    }
    Tile<float> tile{{}, {}, TILE, padded_dim};
    for (int group = 0; group < GROUPS; ++group) {
      tile.keys[group] = key_buffer + group * LANES;
      tile.values[group] = value_buffer + group * LANES * padded_dim;
    }
    return tile;
  }
};

// The same tile as float32, side by side: for many rows, which then convert nothing.
template <typename T>
Tile<float> unpacked(const Tile<T>& tile, int64_t dims, float* buffer) {
  Tile<float> result{{}, {}, TILE, dims};
  for (int g = 0; g < GROUPS; ++g) {
    float *keys = buffer + g * LANES, *values = buffer + (TILE + g * LANES) * dims;
    for (int64_t dim = 0; dim < dims; ++dim)
      store(keys + dim * TILE, load(tile.keys[g] + dim * tile.key_stride));
    for (int64_t j = 0; j < LANES; ++j)
      for (int64_t dim = 0; dim < dims; dim += LANES)
        store(values + j * dims + dim, load(tile.values[g] + j * tile.value_stride + dim));
    result.keys[g] = keys;
    result.values[g] = values;
  }
  return result;
}

template <typename S>
INLINE void prefetch(const S* at) { __builtin_prefetch(at, 0, 2); }

// scores[r] = the products of R queries with all keys of a tile.
template <int R, bool AHEAD, typename S>
INLINE void multiply_keys(const float* const* queries, const Tile<S>& tile, const Tile<S>& next,
                          int64_t dims, Lanes (&scores)[R][GROUPS]) {
  constexpr int C = SIDE_BY_SIDE;
  for (int first = 0; first < GROUPS; first += C) {
    Lanes sums[R][C] = {};
    for (int64_t dim = 0; dim < dims; ++dim) {
      Lanes keys[C];
      for (int c = 0; c < C; ++c) {
        keys[c] = load(tile.keys[first + c] + dim * tile.key_stride);
        if (AHEAD) prefetch(next.keys[first + c] + dim * next.key_stride);
      }
      for (int r = 0; r < R; ++r) {
        const Lanes query = all(queries[r][dim]);
        for (int c = 0; c < C; ++c) sums[r][c] = fma(query, keys[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) scores[r][first + c] = sums[r][c];
  }
}

// mixed[r] = mixed[r] * shrink[r] + the weights of R rows times the values of `count` positions, for
// C lanes of dimensions from `first` on.
template <int R, int C, bool AHEAD, typename S>
INLINE void multiply_values(const float (&weights)[R][TILE], Lanes shrink, const Tile<S>& tile,
                            const Tile<S>& next, int64_t count, int64_t first, float* mixed,
                            int64_t dims) {
  Lanes sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      sums[r][c] = load(mixed + r * dims + first + c * LANES) * shrink[r];
  for (int64_t j = 0; j < count; ++j) {
    const int64_t place = (j % LANES) * tile.value_stride + first;
    const S* from = tile.values[j / LANES] + place;
    Lanes values[C];
    for (int c = 0; c < C; ++c) {
      values[c] = load(from + c * LANES);
      if (AHEAD) prefetch(next.values[j / LANES] + place + c * LANES);
    }
    for (int r = 0; r < R; ++r) {
      const Lanes weight = all(weights[r][j]);
      for (int c = 0; c < C; ++c) sums[r][c] = fma(weight, values[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(mixed + r * dims + first + c * LANES, sums[r][c]);
}

// Softmax of one tile, in base 2: turns scores into weights, adds them to `total` lane by lane, and
// returns by how much what came before shrinks: one lane for each row, 0 at the first tile.
template <int R>
INLINE Lanes take_tile(Lanes (&scores)[R][GROUPS], const int64_t* visible, int64_t base,
                       float* best, float* total, float (&weights)[R][TILE]) {
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  const Lanes hidden = all(-INFINITY);
  Lanes shrink = {};
  for (int r = 0; r < R; ++r) {
    const int64_t seen = visible[r] - base;
    if (seen < TILE)
      for (int g = 0; g < GROUPS; ++g)
        scores[r][g] = choose(lane + g * LANES < int32_t(seen), scores[r][g], hidden);
    Lanes top = scores[r][0];
    for (int g = 1; g < GROUPS; ++g) top = larger(top, scores[r][g]);
    const float before = best[r];
    best[r] = std::max(before, largest(top));
    shrink[r] = before - best[r];
  }
  shrink = exp2_lanes(shrink);
  for (int r = 0; r < R; ++r) {
    Lanes weight[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
      weight[g] = exp2_lanes(scores[r][g] - best[r]);
      store(weights[r] + g * LANES, weight[g]);
    }
    for (int half = GROUPS / 2; half; half /= 2)  // always the same tree
      for (int g = 0; g < half; ++g) weight[g] += weight[g + half];
    store(total + r * LANES, load(total + r * LANES) * shrink[r] + weight[0]);
  }
  return shrink;
}

template <int R, bool AHEAD, typename S>
INLINE void mix_values(const float (&weights)[R][TILE], Lanes shrink, const Tile<S>& tile,
                       const Tile<S>& next, int64_t count, float* mixed, int64_t dims) {
  int64_t first = 0;
  constexpr int C = SIDE_BY_SIDE;
  for (; first + C * LANES <= dims; first += C * LANES)
    multiply_values<R, C, AHEAD>(weights, shrink, tile, next, count, first, mixed, dims);
  for (; first < dims; first += LANES)
    multiply_values<R, 1, AHEAD>(weights, shrink, tile, next, count, first, mixed, dims);
}

// What some rows have seen so far. Row r sees positions 0 .. visible[r] - 1.
struct Rows {
  const float* const* queries;
  const int64_t* visible;
  float* best;   // [rows]: the largest score
  float* total;  // [rows, LANES]: what weights add up to
  float* mixed;  // [rows, padded_dim]: weights times values

  Rows from(int64_t row, int64_t dims) const {
    return {queries + row, visible + row, best + row, total + row * LANES, mixed + row * dims};
  }
};

// One tile for R rows. `next` is what will be read after it.
template <int R, bool AHEAD, typename S>
void attend_tile(const Rows& rows, const Tile<S>& tile, const Tile<S>& next, int64_t base,
                 int64_t dims) {
  const int64_t end = *std::max_element(rows.visible, rows.visible + R);
  if (end <= base) return;
  Lanes scores[R][GROUPS];
  alignas(64) float weights[R][TILE];
  multiply_keys<R, AHEAD>(rows.queries, tile, next, dims, scores);
  const Lanes shrink = take_tile<R>(scores, rows.visible, base, rows.best, rows.total, weights);
  const int64_t count = std::min<int64_t>(TILE, end - base);
  mix_values<R, AHEAD>(weights, shrink, tile, next, count, rows.mixed, dims);
}

// One tile for all rows, some at a time.
template <bool AHEAD, typename S>
void attend_all(int64_t count, const Rows& all_rows, const Tile<S>& tile, const Tile<S>& next,
                int64_t base, int64_t dims) {
  for (int64_t row = 0; row < count; row += MOST_ROWS) {
    const Rows rows = all_rows.from(row, dims);
    switch (std::min<int64_t>(MOST_ROWS, count - row)) {
      case 1: attend_tile<1, AHEAD>(rows, tile, next, base, dims); break;
      case 2: attend_tile<2, AHEAD>(rows, tile, next, base, dims); break;
      case 3: attend_tile<3, AHEAD>(rows, tile, next, base, dims); break;
      case 4: attend_tile<4, AHEAD>(rows, tile, next, base, dims); break;
      case 5: attend_tile<5, AHEAD>(rows, tile, next, base, dims); break;
      default: attend_tile<6, AHEAD>(rows, tile, next, base, dims);
    }
  }
}

// Attention of `count` rows over one request. A tile is taken by all of them before the next one,
// so that it is read from memory once. `after` is what will be read when all is done. `buffer` has
// room for a tile of float32 keys and values.
template <typename T>
void attend(int64_t count, const Rows& rows, const Blocks<T>& blocks, const Tile<T>& after,
            float* buffer) {
  const int64_t dims = blocks.padded_dim;
  std::fill(rows.best, rows.best + count, -INFINITY);
  std::fill(rows.total, rows.total + count * LANES, 0.0f);
  std::fill(rows.mixed, rows.mixed + count * dims, 0.0f);
  const int64_t end = *std::max_element(rows.visible, rows.visible + count);
  for (int64_t base = 0; base < end; base += TILE) {
    const int64_t number = base / TILE;
    if (!blocks.direct()) {
      const Tile<float> tile = blocks.packed(number, buffer);
      attend_all<false>(count, rows, tile, tile, base, dims);
    } else if (count > FEW_ROWS && sizeof(T) < sizeof(float)) {
      const Tile<float> tile = unpacked(blocks.tile(number), dims, buffer);
      attend_all<false>(count, rows, tile, tile, base, dims);
    } else if (count > FEW_ROWS) {
      attend_all<false>(count, rows, blocks.tile(number), after, base, dims);
    } else {
      const Tile<T> next = base + TILE < end ? blocks.tile(number + 1) : after;
      attend_all<true>(count, rows, blocks.tile(number), next, base, dims);
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    const float total = sum(load(rows.total + row * LANES));
    for (int64_t dim = 0; dim < dims; dim += LANES)
      store(rows.mixed + row * dims + dim, load(rows.mixed + row * dims + dim) / total);
  }
}

}  // namespace tasuki
