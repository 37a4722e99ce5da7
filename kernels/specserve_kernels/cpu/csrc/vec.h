// Sixteen floats as one value, in AVX-512 where the translation unit has it and in GCC vector extensions elsewhere.
// Kernels written over it do the same operations for every lane, so a lane's bits never depend on its neighbours.
// Everything is static: each translation unit keeps its own copy, none may leak into code for a smaller machine.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef SPEC_AVX512
#include <immintrin.h>
#endif

namespace spec {
namespace SPEC_NS {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef double D __attribute__((vector_size(64)));
typedef int64_t L __attribute__((vector_size(64)));
typedef uint64_t UL __attribute__((vector_size(64)));
typedef uint16_t bf16;
typedef uint16_t Mask;

static inline F splat(float x) { return F{} + x; }
static inline I bits(F x) { return (I)x; }

static inline float widen1(bf16 h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline float widen1(float f) { return f; }

#ifdef SPEC_AVX512
static inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline F select(Mask m, F yes, F no) { return (F)_mm512_mask_mov_ps((__m512)no, m, (__m512)yes); }
// a * b + c in the lanes of m, c in the others
static inline F fma_where(Mask m, F a, F b, F c) {
  return (F)_mm512_mask3_fmadd_ps((__m512)a, (__m512)b, (__m512)c, m);
}
// NaN in b survives
static inline F vmax(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
static inline F vmin(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
static inline F load(const float* p) { return (F)_mm512_loadu_ps(p); }
static inline F load(const bf16* p) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
static inline void store(float* p, F x) { _mm512_storeu_ps(p, (__m512)x); }
static inline F load_n(const float* p, int n) { return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
static inline F load_n(const bf16* p, int n) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)), 16);
}
static inline H narrow(F f) {
#ifdef __AVX512BF16__
  // The instruction flushes subnormal numbers, and keeps of a NaN what no other machine keeps.
  const bool plain = !_mm512_fpclass_ps_mask((__m512)f, 0x01 | 0x20 | 0x80);  // quiet NaN, subnormal, signalling NaN
  if (__builtin_expect(plain, 1)) return (H)_mm512_cvtneps_pbh((__m512)f);
#endif
  const __m512i u = (__m512i)f;
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask((__m512)f, (__m512)f, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return (H)_mm512_cvtepi32_epi16(r);
}
static inline void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x); }
static inline void store_n(bf16* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)narrow(x));
}
#else
static inline F fma(F a, F b, F c) { return a * b + c; }  // two roundings: -ffp-contract=off
static inline F select(Mask m, F yes, F no) {
  I lane;
  for (int i = 0; i < 16; i++) lane[i] = -((m >> i) & 1);
  return (F)(((I)yes & lane) | ((I)no & ~lane));
}
static inline F fma_where(Mask m, F a, F b, F c) { return select(m, fma(a, b, c), c); }
static inline F vmax(F a, F b) { return a > b ? a : b; }
static inline F vmin(F a, F b) { return a < b ? a : b; }
static inline F load(const float* p) {
  F f;
  memcpy(&f, p, 64);
  return f;
}
static inline F load(const bf16* p) {
  H h;
  memcpy(&h, p, 32);
  return (F)(__builtin_convertvector(h, U) << 16);
}
static inline void store(float* p, F x) { memcpy(p, &x, 64); }
template <class T>
static inline F load_n(const T* p, int n) {
  F f = F{};
  for (int i = 0; i < n; i++) f[i] = widen1(p[i]);
  return f;
}
static inline H narrow(F f) {
  const U u = (U)f;
  U r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U nan = (U)(f != f);
  r = (r & ~nan) | (nan & 0x7fc0u);
  return __builtin_convertvector(r, H);
}
static inline void store_n(float* p, F x, int n) {
  for (int i = 0; i < n; i++) p[i] = x[i];
}
static inline void store_n(bf16* p, F x, int n) {
  const H h = narrow(x);
  for (int i = 0; i < n; i++) p[i] = h[i];
}
#endif

static inline void store(bf16* p, F x) {
  const H h = narrow(x);
  memcpy(p, &h, 32);
}
// what a value is after it was stored as T and read back
template <class T>
static inline F rounded(F x);
template <>
inline F rounded<float>(F x) { return x; }
template <>
inline F rounded<bf16>(F x) { return (F)(__builtin_convertvector(narrow(x), U) << 16); }

// lanes summed in one fixed tree
static inline float sum16(F x) {
  float a[16];
  memcpy(a, &x, 64);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) a[i] += a[i + w];
  return a[0];
}

// exp of x <= 88; 0 below -87. Relative error below 2^-22. Cody-Waite reduction, degree 6, NaN survives.
static inline F vexp(F x) {
  const F lo = splat(-87.0f), hi = splat(88.0f);
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F c = vmin(hi, vmax(lo, x));
  const F t = fma(c, splat(1.44269504088896341f), magic);
  const F n = t - magic;
  F r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const I e = (bits(t) - bits(magic) + 127) << 23;
  const F y = p * (F)e;
  const I small = x < lo;
  return (F)((I)y & ~small);
}

// log of a positive normal double, below 1 ulp (fdlibm's). No fused operation: the same bits on every machine.
static inline D vlog(D x) {
  const L u = (L)x;
  L k = (u >> 52) - 1023;
  L frac = u & 0x000fffffffffffffL;
  const L up = frac >= 0x6a09e667f3bcdL;  // mantissa at or above sqrt(2): use m/2
  k = k - up;
  const L one = L{} + 0x3ff0000000000000L;
  const D m = (D)(frac | (one + (up & -0x0010000000000000L)));
  const D f = m - 1.0;
  const D s = f / (2.0 + f);
  const D z = s * s;
  const D w = z * z;
  const D t1 = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const D t2 = z * (6.666666666666735130e-01 +
                    w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const D r = t2 + t1;
  const D hfsq = 0.5 * f * f;
  const D dk = __builtin_convertvector(k, D);
  return dk * 6.93147180369123816490e-01 - ((hfsq - (s * (hfsq + r) + dk * 1.90821492927058770002e-10)) - f);
}

// exp of a double <= 0, within 2 ulp; 0 below -700. No fused operation either.
static inline D vexp64(D x) {
  const D lo = D{} - 700.0, magic = D{} + 0x1.8p52;
  const L small = x < lo;
  const D c = small ? lo : x;
  const D t = c * 1.4426950408889634 + magic;
  const D n = t - magic;
  const D r = (c - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  D p = D{} + 1.0 / 479001600;
  const double inverse[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                            1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
  for (double f : inverse) p = p * r + f;
  const L e = ((L)t - (L)magic + 1023) << 52;
  return (D)((L)(p * (D)e) & ~small);
}

}  // namespace SPEC_NS
}  // namespace spec
