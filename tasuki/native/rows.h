// What is done to each row of a step on its own: norms, rotary positions, the gated activation.
//
// Kept values are of type T (float or bf16); arithmetic is float32, rounded to T where the
// reference implementation keeps a tensor. Sums have a fixed order, so that a row's result is its
// own business.
#pragma once

#include <cmath>

#include "lanes.h"

namespace tasuki {

// The mean of squares of `count` values, whose tail beyond whole lanes is added one by one.
template <typename T>
INLINE float mean_square(const T* values, int64_t count) {
  Lanes parts[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int k = 0; k < 4; ++k) {
      const Lanes lanes = load(values + i + k * LANES);
      parts[k] = fma(lanes, lanes, parts[k]);
    }
  for (; i + LANES <= count; i += LANES) {
    const Lanes lanes = load(values + i);
    parts[0] = fma(lanes, lanes, parts[0]);
  }
  float total = sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (; i < count; ++i) total += to_float(values[i]) * to_float(values[i]);
  return total / float(count);
}

// out = x / rms(x) * weight, after adding `delta` to x in place if there is one.
template <typename T>
void normalise(T* x, const T* delta, const float* weight, float eps, T* out, int64_t width) {
  if (delta) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(x + i, load(x + i) + load(delta + i));
    for (; i < width; ++i) put(x + i, to_float(x[i]) + to_float(delta[i]));
  }
  const float scale = 1.0f / std::sqrt(mean_square(x, width) + eps);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES)
    store(out + i, rounded(load(x + i) * scale, x) * load(weight + i));
  for (; i < width; ++i) {
    T kept;
    put(&kept, to_float(x[i]) * scale);
    put(out + i, to_float(kept) * weight[i]);
  }
}

INLINE Lanes silu(Lanes x) { return x / (1.0f + exp2_lanes(x * -1.44269504f)); }

// out = silu(gate) * up; the last lanes are computed like all others, padded with zeros.
template <typename T>
void gated(const T* gate, const T* up, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES)
    store(out + i, rounded(silu(load(gate + i)), out) * load(up + i));
  if (i == width) return;
  T gates[LANES] = {}, ups[LANES] = {}, results[LANES];
  std::memcpy(gates, gate + i, (width - i) * sizeof(T));
  std::memcpy(ups, up + i, (width - i) * sizeof(T));
  store(results, rounded(silu(load(gates)), out) * load(ups));
  std::memcpy(out + i, results, (width - i) * sizeof(T));
}

// out = head + bias, or only head.
template <typename T>
void biased(const T* head, const float* bias, T* out, int64_t dims) {
  if (!bias) {
    std::memcpy(out, head, dims * sizeof(T));
    return;
  }
  int64_t i = 0;
  for (; i + LANES <= dims; i += LANES) store(out + i, load(head + i) + load(bias + i));
  for (; i < dims; ++i) put(out + i, to_float(head[i]) + bias[i]);
}

// One head of q or k as U: bias added, normalised if there is a weight, rotated, scaled.
template <typename T, typename U>
void rotated(const T* head, const float* bias, const float* weight, float eps, const float* cos,
             const float* sin, float scale, U* out, int64_t dims) {
  const int64_t half = dims / 2;
  T kept[512];
  biased(head, bias, kept, dims);
  if (weight) normalise<T>(kept, nullptr, weight, eps, kept, dims);
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Lanes a = load(kept + i), b = load(kept + i + half), c = load(cos + i), s = load(sin + i);
    store(out + i, (a * c - b * s) * scale);
    store(out + i + half, (b * c + a * s) * scale);
  }
  for (; i < half; ++i) {
    const float a = to_float(kept[i]), b = to_float(kept[i + half]);
    put(out + i, (a * cos[i] - b * sin[i]) * scale);
    put(out + i + half, (b * cos[i] + a * sin[i]) * scale);
  }
}

}  // namespace tasuki
