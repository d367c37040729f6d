// y = x W^T with fixed weights, for one row or thousands.
//
// A row's result does not depend on the rows beside it: each output adds its products in the order
// of the inputs, in one chain, in whatever company. Weights are packed into panels of outputs,
// so that a panel is read once, in the order in which it lies, for all rows.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace tasuki {

constexpr int64_t ceiling(int64_t count, int64_t by) { return (count + by - 1) / by; }

constexpr int PANEL_LANES = SIDE_BY_SIDE;
constexpr int PANEL = PANEL_LANES * LANES;  // outputs
constexpr int LINEAR_ROWS = 6;

// What inputs are multiplied as, and how many of them at once. A processor with an instruction for it
// takes bfloat16 in pairs, side by side; any other, one by one as float32.
#if defined(__AVX512BF16__)
template <typename T> using Input = T;
template <typename T> constexpr int PER_STEP = sizeof(float) / sizeof(T);
#else
template <typename T> using Input = float;
template <typename T> constexpr int PER_STEP = 1;
#endif

// Steps over `inputs`; the last one of an odd number is padded with a zero.
template <typename T> constexpr int64_t steps_of(int64_t inputs) {
  return ceiling(inputs, PER_STEP<T>);
}

// Elements that a packed weight takes: [panels, steps, PANEL outputs, PER_STEP].
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

// One step's products of R rows, `width` inputs apart.
template <int R, typename T>
INLINE void add_products(Lanes (&sums)[R][PANEL_LANES], const float* x, int64_t width,
                         const T* panel) {
  Lanes weights[PANEL_LANES];
  for (int c = 0; c < PANEL_LANES; ++c) weights[c] = load(panel + c * LANES);
  for (int r = 0; r < R; ++r) {
    const Lanes input = all(x[r * width]);
    for (int c = 0; c < PANEL_LANES; ++c) sums[r][c] = fma(input, weights[c], sums[r][c]);
  }
}

#if defined(__AVX512BF16__)
template <typename To>
INLINE To bits(const bf16* from) {
  To to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

template <int R>
INLINE void add_products(Lanes (&sums)[R][PANEL_LANES], const bf16* x, int64_t width,
                         const bf16* panel) {
  Ints weights[PANEL_LANES];
  for (int c = 0; c < PANEL_LANES; ++c) weights[c] = bits<Ints>(panel + c * LANES * 2);
  for (int r = 0; r < R; ++r) {
    const Ints input = all_ints(bits<int32_t>(x + r * width));
    for (int c = 0; c < PANEL_LANES; ++c)
      sums[r][c] = (Lanes)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)input,
                                           (__m512bh)weights[c]);
  }
}
#endif

// Intel's processors since Sapphire Rapids gain up to 1.5 times by it, a Zen 3 up to 1.4. A Zen 4 does
// by itself what this does, and is slower for being told: docs/adr/0007.
#if defined(__AVX512FP16__) || !defined(__AVX512F__)
constexpr bool FETCHES_AHEAD = true;
#else
constexpr bool FETCHES_AHEAD = false;
#endif

// The panel after the one that is being multiplied, fetched evenly over `groups` of rows: memory and
// arithmetic then work at the same time.
struct Ahead {
  const char* line;  // null: there is none
  int64_t groups, due = 0;

  // With each step of each group, whose weights are so many bytes.
  INLINE void fetch_some(int64_t bytes) {
    if (!FETCHES_AHEAD || line == nullptr) return;
    const int64_t each = groups * sizeof(Lanes);
    for (due += bytes; due >= each; due -= each) {
      __builtin_prefetch(line, 0, 2);
      line += sizeof(Lanes);
    }
  }
};

// R rows times one panel: x is [R, inputs], y [R, outputs] from the panel's first output on, of which
// `count` exist.
template <int R, typename T>
void multiply(const Input<T>* x, int64_t inputs, const T* panel, T* y, int64_t outputs,
              int64_t count, Ahead& next) {
  Lanes sums[R][PANEL_LANES] = {};
  Ahead ahead = next;
  int64_t k = 0;
  for (; k + PER_STEP<T> <= inputs; k += PER_STEP<T>) {
    ahead.fetch_some(PANEL * PER_STEP<T> * sizeof(T));
    add_products<R>(sums, x + k, inputs, panel + k * PANEL);
  }
  if (k < inputs) {  // the last of an odd number, beside a zero
    Input<T> last[R * PER_STEP<T>] = {};
    for (int r = 0; r < R; ++r) last[r * PER_STEP<T>] = x[r * inputs + k];
    add_products<R>(sums, last, PER_STEP<T>, panel + k * PANEL);
  }
  next = ahead;
  for (int r = 0; r < R; ++r) {
    T kept[PANEL];
    for (int c = 0; c < PANEL_LANES; ++c) store(kept + c * LANES, sums[r][c]);
    std::memcpy(y + r * outputs, kept, count * sizeof(T));
  }
}

template <typename T>
void multiply_some(int64_t rows, const Input<T>* x, int64_t inputs, const T* panel, T* y,
                   int64_t outputs, int64_t count, Ahead& next) {
  switch (rows) {
    case 1: return multiply<1, T>(x, inputs, panel, y, outputs, count, next);
    case 2: return multiply<2, T>(x, inputs, panel, y, outputs, count, next);
    case 3: return multiply<3, T>(x, inputs, panel, y, outputs, count, next);
    case 4: return multiply<4, T>(x, inputs, panel, y, outputs, count, next);
    case 5: return multiply<5, T>(x, inputs, panel, y, outputs, count, next);
    default: return multiply<6, T>(x, inputs, panel, y, outputs, count, next);
  }
}

// The same for any number of rows; `next` is the panel that comes after this one, or null.
template <typename T>
void multiply_rows(int64_t rows, const Input<T>* x, int64_t inputs, const T* panel, const T* next,
                   T* y, int64_t outputs, int64_t count) {
  Ahead ahead{(const char*)next, ceiling(rows, LINEAR_ROWS)};
  for (int64_t done = 0; done < rows;) {
    const int64_t left = rows - done;
    // seven to eleven go as two of nearly the same number: one alone would wait for its own sums
    const int64_t some = left >= 2 * LINEAR_ROWS ? LINEAR_ROWS
                         : left > LINEAR_ROWS    ? (left + 1) / 2
                                                 : left;
    multiply_some<T>(some, x + done * inputs, inputs, panel, y + done * outputs, outputs, count,
                  ahead);
    done += some;
  }
}

}  // namespace tasuki
