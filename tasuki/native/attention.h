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
constexpr int MOST_ROWS = 6;  // with 4 accumulators each, and 4 lanes of keys, in 32 registers
constexpr int MOST_DIM = 512;

// Where the keys and values of one tile are, in groups of 16 positions.
template <typename S>
struct Tile {
  const S* keys[GROUPS];    // [head_dim][16], rows `key_stride` apart
  const S* values[GROUPS];  // [16][head_dim], rows `value_stride` apart
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

template <typename S>
INLINE void prefetch(const S* at) { __builtin_prefetch(at, 0, 2); }

// scores[r] = the products of R queries with all keys of a tile.
template <int R, bool AHEAD, typename S>
INLINE void multiply_keys(const float* const* queries, const Tile<S>& tile, const Tile<S>& next,
                          int64_t dims, Lanes (&scores)[R][GROUPS]) {
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < GROUPS; ++g) scores[r][g] = Lanes{};
  for (int64_t dim = 0; dim < dims; ++dim) {
    Lanes keys[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
      keys[g] = load(tile.keys[g] + dim * tile.key_stride);
      if (AHEAD) prefetch(next.keys[g] + dim * next.key_stride);
    }
    for (int r = 0; r < R; ++r) {
      const Lanes query = all(queries[r][dim]);
      for (int g = 0; g < GROUPS; ++g) scores[r][g] = fma(query, keys[g], scores[r][g]);
    }
  }
}

// mixed[r] += the probabilities of R rows times the values of `count` positions, for C lanes of
// dimensions from `first` on.
template <int R, int C, bool AHEAD, typename S>
INLINE void multiply_values(const float (&weights)[R][TILE], const Tile<S>& tile,
                            const Tile<S>& next, int64_t count, int64_t first, float* mixed,
                            int64_t dims) {
  Lanes sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(mixed + r * dims + first + c * LANES);
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

// Softmax of one tile, in base 2: turns scores into weights and scales what came before.
template <int R>
INLINE void take_tile(Lanes (&scores)[R][GROUPS], const int64_t* visible, int64_t base,
                      float (&best)[R], float (&total)[R], float (&weights)[R][TILE],
                      float* mixed, int64_t dims) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Lanes hidden = all(-INFINITY);
  for (int r = 0; r < R; ++r) {
    const int64_t seen = visible[r] - base;
    if (seen < TILE)
      for (int g = 0; g < GROUPS; ++g)
        scores[r][g] = choose(lane + g * LANES < int32_t(seen), scores[r][g], hidden);
    const Lanes top = larger(larger(scores[r][0], scores[r][1]), larger(scores[r][2], scores[r][3]));
    const float before = best[r];
    best[r] = std::max(before, largest(top));
    Lanes weight[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
      weight[g] = exp2_lanes(scores[r][g] - best[r]);
      store(weights[r] + g * LANES, weight[g]);
    }
    const float added = sum((weight[0] + weight[1]) + (weight[2] + weight[3]));
    const Lanes shrink = exp2_lanes(all(before - best[r]));  // 0 at the first tile
    total[r] = total[r] * shrink[0] + added;
    for (int64_t dim = 0; dim < dims; dim += LANES)
      store(mixed + r * dims + dim, load(mixed + r * dims + dim) * shrink);
  }
}

template <int R, bool AHEAD, typename S>
INLINE void mix_values(const float (&weights)[R][TILE], const Tile<S>& tile, const Tile<S>& next,
                       int64_t count, float* mixed, int64_t dims) {
  int64_t first = 0;
  for (; first + 4 * LANES <= dims; first += 4 * LANES)
    multiply_values<R, 4, AHEAD>(weights, tile, next, count, first, mixed, dims);
  for (; first < dims; first += LANES)
    multiply_values<R, 1, AHEAD>(weights, tile, next, count, first, mixed, dims);
}

// Attention of R rows; row r sees positions 0 .. visible[r] - 1, and writes to mixed[r * padded_dim].
// `after` is what will be read next. `buffer` has room for two packed tiles.
template <int R, bool AHEAD, typename T>
void attend_rows(const float* const* queries, const int64_t* visible, const Blocks<T>& blocks,
                 const Tile<T>& after, float* mixed, float* buffer) {
  const int64_t dims = blocks.padded_dim;
  float best[R], total[R];
  alignas(64) float weights[R][TILE];
  std::fill(best, best + R, -INFINITY);
  std::fill(total, total + R, 0.0f);
  std::fill(mixed, mixed + R * dims, 0.0f);
  const int64_t end = *std::max_element(visible, visible + R);
  Lanes scores[R][GROUPS];
  for (int64_t base = 0; base < end; base += TILE) {
    const int64_t count = std::min<int64_t>(TILE, end - base), number = base / TILE;
    if (blocks.direct()) {
      const Tile<T> tile = blocks.tile(number);
      const Tile<T> next = base + TILE < end ? blocks.tile(number + 1) : after;
      multiply_keys<R, AHEAD>(queries, tile, next, dims, scores);
      take_tile<R>(scores, visible, base, best, total, weights, mixed, dims);
      mix_values<R, AHEAD>(weights, tile, next, count, mixed, dims);
    } else {
      const Tile<float> tile = blocks.packed(number, buffer);
      multiply_keys<R, false>(queries, tile, tile, dims, scores);
      take_tile<R>(scores, visible, base, best, total, weights, mixed, dims);
      mix_values<R, false>(weights, tile, tile, count, mixed, dims);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int64_t dim = 0; dim < dims; dim += LANES)
      store(mixed + r * dims + dim, load(mixed + r * dims + dim) / total[r]);
}

template <bool AHEAD, typename T>
void attend_some(int64_t rows, const float* const* queries, const int64_t* visible,
                 const Blocks<T>& blocks, const Tile<T>& after, float* mixed, float* buffer) {
  switch (rows) {
    case 1: return attend_rows<1, AHEAD>(queries, visible, blocks, after, mixed, buffer);
    case 2: return attend_rows<2, AHEAD>(queries, visible, blocks, after, mixed, buffer);
    case 3: return attend_rows<3, AHEAD>(queries, visible, blocks, after, mixed, buffer);
    case 4: return attend_rows<4, AHEAD>(queries, visible, blocks, after, mixed, buffer);
    case 5: return attend_rows<5, AHEAD>(queries, visible, blocks, after, mixed, buffer);
    default: return attend_rows<6, AHEAD>(queries, visible, blocks, after, mixed, buffer);
  }
}

}  // namespace tasuki
