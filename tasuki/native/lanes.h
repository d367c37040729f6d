// One register of float32 lanes: the one vector type of the kernels, on whatever this processor has.
//
// Plain operators are GCC's vector extensions and exist on every processor; only what they cannot
// say (fused multiply-add, bfloat16) has a form per instruction set. Nothing here depends on which
// lane a value stands in. A vector wider than a register would live in memory: hence LANES, and how
// many of them the innermost loops may hold.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace tasuki {

// Libraries with the same name here give the same bits.
#if defined(__AVX512BF16__)
constexpr char INSTRUCTIONS[] = "avx512bf16";
#elif defined(__AVX512F__)
constexpr char INSTRUCTIONS[] = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
constexpr char INSTRUCTIONS[] = "avx2";
#else
constexpr char INSTRUCTIONS[] = "plain";
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int SIDE_BY_SIDE = 4;  // times six rows of accumulators, in 32 registers
#else
constexpr int LANES = 8;
constexpr int SIDE_BY_SIDE = 2;  // in 16
#endif
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint16_t bf16;  // the upper half of a float32

#define INLINE inline __attribute__((always_inline))

INLINE Lanes all(float value) { return value - Lanes{}; }  // a broadcast: -0.0 stays -0.0
INLINE Ints all_ints(int32_t value) { return value - Ints{}; }

INLINE Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

INLINE void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

INLINE Lanes load(const bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const Ints wide = (Ints)_mm256_cvtepu16_epi32((__m128i)halves);  // GCC 12 takes five instructions
#else
  const Ints wide = __builtin_convertvector(halves, Ints);
#endif
  return (Lanes)(wide << 16);
}

INLINE float to_float(float value) { return value; }
INLINE float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to the nearest, ties to even, as torch does; a NaN stays one.
INLINE bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0;
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store(bf16* to, Lanes lanes) {
  const Ints bits = (Ints)lanes;
  const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Ints nan = lanes != lanes;
  const Halves halves = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Halves);
  std::memcpy(to, &halves, sizeof halves);
}

INLINE void put(float* to, float value) { *to = value; }
INLINE void put(bf16* to, float value) { *to = to_bf16(value); }

// What a value becomes when it is kept as a T.
INLINE Lanes rounded(Lanes lanes, const float*) { return lanes; }
INLINE Lanes rounded(Lanes lanes, const bf16*) {
  bf16 kept[LANES];
  store(kept, lanes);
  return load(kept);
}

INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE Lanes choose(Ints mask, Lanes yes, Lanes no) {
  return (Lanes)((mask & (Ints)yes) | (~mask & (Ints)no));
}

INLINE Lanes larger(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return choose(a > b, a, b);
#endif
}

// Lanes are added, or compared, in halves: always the same tree.
INLINE float sum(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float part[LANES];
  store(part, lanes);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
#endif
}

INLINE float largest(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float part[LANES];
  store(part, lanes);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
  return part[0];
#endif
}

// 2 ** x for x up to 127, to about one unit in the last place; 0 far below -126, -inf included.
//
// x = n + f with n whole and f in [-0.5, 0.5]; 2 ** f is its Taylor series to degree 7, whose next
// term is below 1e-8. What a product with 2 ** n leaves of the smallest results depends on the
// processor, and on nothing else.
INLINE Lanes exp2_lanes(Lanes x) {
  const Lanes bounded = larger(all(-150.0f), x);  // a NaN stays one
#if defined(__AVX512F__)
  const Lanes n = (Lanes)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT);
#else
  const Lanes large = all(12582912.0f);  // 1.5 * 2 ** 23: adding it leaves no room for fractions
  const Lanes capped = choose(bounded > 127.0f, all(127.0f), bounded);
  const Lanes shifted = capped + large;
  const Lanes n = shifted - large;
#endif
#if defined(__AVX512F__)
  const Lanes f = bounded - n;
#else
  const Lanes f = capped - n;
#endif
  Lanes p = all(1.525273380e-5f);
  p = fma(p, f, all(1.540353039e-4f));
  p = fma(p, f, all(1.333355815e-3f));
  p = fma(p, f, all(9.618129108e-3f));
  p = fma(p, f, all(5.550410866e-2f));
  p = fma(p, f, all(2.402265070e-1f));
  p = fma(p, f, all(6.931471806e-1f));
  p = fma(p, f, all(1.0f));
#if defined(__AVX512F__)
  return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Ints exponent = ((Ints)shifted - (Ints)large + 127) << 23;
  return choose(x < -126.0f, Lanes{}, p * (Lanes)exponent);
#endif
}

}  // namespace tasuki
