// y = x W^T with fixed weights, for one row or thousands.
//
// A row's result does not depend on the rows beside it: each output adds its products in the order
// of the inputs, in one chain, in whatever company. Weights are packed into panels of 64 outputs,
// so that a panel is read once, in the order in which it lies, for all rows.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace tasuki {

constexpr int64_t ceiling(int64_t count, int64_t by) { return (count + by - 1) / by; }

constexpr int PANEL = 64;  // outputs
constexpr int PANEL_LANES = PANEL / LANES;
constexpr int LINEAR_ROWS = 6;  // with 4 accumulators each, and 4 lanes of weights, in 32 registers

// How many inputs one multiplication takes at once: bfloat16 come in pairs, side by side.
template <typename T> constexpr int PER_STEP = sizeof(float) / sizeof(T);

// Steps over `inputs`; the last one of an odd number is padded with a zero.
template <typename T> constexpr int64_t steps_of(int64_t inputs) {
  return ceiling(inputs, PER_STEP<T>);
}

// Elements that a packed weight takes: [panels, steps, 64 outputs, PER_STEP].
template <typename T> constexpr int64_t packed_size(int64_t outputs, int64_t inputs) {
  return ceiling(outputs, PANEL) * steps_of<T>(inputs) * PANEL * PER_STEP<T>;
}

// `weight` is [outputs, inputs]; `packed` holds zeros.
template <typename T>
void pack_panel(const T* weight, int64_t outputs, int64_t inputs, int64_t panel, T* packed) {
  constexpr int64_t BLOCK = 64;  // inputs at a time: both sides then stay in the first cache
  T* to = packed + panel * steps_of<T>(inputs) * PANEL * PER_STEP<T>;
  const int64_t first = panel * PANEL, last = std::min(outputs, first + PANEL);
  for (int64_t from = 0; from < inputs; from += BLOCK)
    for (int64_t n = first; n < last; ++n)
      for (int64_t k = from; k < std::min(inputs, from + BLOCK); ++k)
        to[(k / PER_STEP<T> * PANEL + n - first) * PER_STEP<T> + k % PER_STEP<T>] =
            weight[n * inputs + k];
}

INLINE Ints as_ints(const void* from) {
  Ints ints;
  std::memcpy(&ints, from, sizeof ints);
  return ints;
}

// One step's inputs of one row, for all lanes.
INLINE Ints inputs_at(const float* x, int64_t) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof bits);
  return all_ints(bits);
}
INLINE Ints inputs_at(const bf16* x, int64_t left) {
  uint32_t bits = x[0];
  if (left > 1) std::memcpy(&bits, x, sizeof bits);
  return all_ints(int32_t(bits));
}

INLINE Lanes add_products(Lanes sum, Ints x, Ints weights, const float*) {
  return fma((Lanes)x, (Lanes)weights, sum);
}
INLINE Lanes add_products(Lanes sum, Ints x, Ints weights, const bf16*) {
#if defined(__AVX512BF16__)
  return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
  const Ints upper = all_ints(int32_t(0xffff0000));
  sum = fma((Lanes)(x << 16), (Lanes)(weights << 16), sum);
  return fma((Lanes)(x & upper), (Lanes)(weights & upper), sum);
#endif
}

// Intel's processors since Sapphire Rapids gain up to 1.5 times by it. A Zen 4 does by itself what this
// does, and is slower for being told: docs/adr/0007.
#if defined(__AVX512FP16__)
constexpr bool FETCHES_AHEAD = true;
#else
constexpr bool FETCHES_AHEAD = false;
#endif

// The panel after the one that is being multiplied, fetched evenly over `groups` of rows: memory and
// arithmetic then work at the same time.
struct Ahead {
  const char* line;  // null: there is none
  int64_t groups, due = 0;

  INLINE void fetch_some() {
    if (!FETCHES_AHEAD || line == nullptr) return;
    for (due += PANEL_LANES; due >= groups; due -= groups) {
      __builtin_prefetch(line, 0, 2);
      line += sizeof(Lanes);
    }
  }
};

// R rows times one panel: x is [R, inputs], y [R, outputs] from the panel's first output on, of which
// `count` exist.
template <int R, typename T>
void multiply(const T* x, int64_t inputs, const T* panel, T* y, int64_t outputs, int64_t count,
              Ahead& next) {
  Lanes sums[R][PANEL_LANES] = {};
  Ahead ahead = next;
  for (int64_t k = 0; k < steps_of<T>(inputs); ++k) {
    ahead.fetch_some();
    Ints weights[PANEL_LANES];
    for (int c = 0; c < PANEL_LANES; ++c)
      weights[c] = as_ints(panel + (k * PANEL + c * LANES) * PER_STEP<T>);
    for (int r = 0; r < R; ++r) {
      const int64_t place = k * PER_STEP<T>;
      const Ints some = inputs_at(x + r * inputs + place, inputs - place);
      for (int c = 0; c < PANEL_LANES; ++c)
        sums[r][c] = add_products(sums[r][c], some, weights[c], x);
    }
  }
  next = ahead;
  for (int r = 0; r < R; ++r) {
    T kept[PANEL];
    for (int c = 0; c < PANEL_LANES; ++c) store(kept + c * LANES, sums[r][c]);
    std::memcpy(y + r * outputs, kept, count * sizeof(T));
  }
}

template <typename T>
void multiply_some(int64_t rows, const T* x, int64_t inputs, const T* panel, T* y, int64_t outputs,
                   int64_t count, Ahead& next) {
  switch (rows) {
    case 1: return multiply<1>(x, inputs, panel, y, outputs, count, next);
    case 2: return multiply<2>(x, inputs, panel, y, outputs, count, next);
    case 3: return multiply<3>(x, inputs, panel, y, outputs, count, next);
    case 4: return multiply<4>(x, inputs, panel, y, outputs, count, next);
    case 5: return multiply<5>(x, inputs, panel, y, outputs, count, next);
    default: return multiply<6>(x, inputs, panel, y, outputs, count, next);
  }
}

// The same for any number of rows; `next` is the panel that comes after this one, or null.
template <typename T>
void multiply_rows(int64_t rows, const T* x, int64_t inputs, const T* panel, const T* next, T* y,
                   int64_t outputs, int64_t count) {
  Ahead ahead{(const char*)next, ceiling(rows, LINEAR_ROWS)};
  for (int64_t done = 0; done < rows;) {
    const int64_t left = rows - done;
    // seven to eleven go as two of nearly the same number: one alone would wait for its own sums
    const int64_t some = left >= 2 * LINEAR_ROWS ? LINEAR_ROWS
                         : left > LINEAR_ROWS    ? (left + 1) / 2
                                                 : left;
    multiply_some(some, x + done * inputs, inputs, panel, y + done * outputs, outputs, count,
                  ahead);
    done += some;
  }
}

}  // namespace tasuki
