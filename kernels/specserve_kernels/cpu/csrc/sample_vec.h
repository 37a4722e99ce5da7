// Noise, and the passes of a draw over one row of logits (sample.h has the draw itself). Values that decide anything
// are computed without fused operations, in one order: the same bits on every instruction set. What only filters may
// differ between them, and is bounded with slack.
#pragma once
#include <math.h>

#include "args.h"
#include "vec.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace spec {
namespace SPEC_NS {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

#ifdef SPEC_AVX512
// lane i: a[i] >= b[i], or one of them is NaN
static inline Mask not_below(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLT_UQ); }
static inline UL low_product(UL a, uint32_t b) { return (UL)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b)); }
#else
static inline Mask not_below(F a, F b) {
  const I below = a < b;
  int64_t part[8], all = -1;
  memcpy(part, &below, 64);
  for (int i = 0; i < 8; i++) all &= part[i];
  if (all == -1) return 0;
  Mask m = 0;
  for (int i = 0; i < 16; i++) m |= (Mask)((below[i] + 1) << i);
  return m;
}
#ifdef __SSE2__  // without a word from us, GCC multiplies all 64 bits
static inline UL low_product(UL a, uint32_t b) {
  __m128i part[4];
  memcpy(part, &a, 64);
  for (__m128i& p : part) p = _mm_mul_epu32(p, _mm_set1_epi64x(b));
  memcpy(&a, part, 64);
  return a;
}
#else
static inline UL low_product(UL a, uint32_t b) { return (a & 0xffffffffull) * (uint64_t)b; }
#endif
#endif

// 16 floats from p[0..n), -inf after them
static inline F load_or_never(const float* p, int64_t n) {
  if (n >= 16) return load(p);
  return n <= 0 ? splat(-INFINITY) : select((Mask)((1u << n) - 1), load_n(p, (int)n), splat(-INFINITY));
}

static inline float largest(F x) {
  float top = x[0];
  for (int i = 1; i < 16; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// --------------------------------------------------------------------------------------------- noise

// Philox4x32-10 for 8 counters c0; the low half of word[w] lane i belongs to counter c0[i], the high half is rubbish
static inline void philox8(UL c0, const NoiseKey& key, UL word[4]) {
  UL c1 = UL{} + (uint32_t)key.draw, c2 = UL{} + (uint32_t)key.choice, c3 = UL{} + (uint32_t)key.purpose;
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)((uint64_t)key.seed >> 32);
  for (int round = 0; round < 10; round++) {
    const UL p0 = low_product(c0, 0xD2511F53u), p1 = low_product(c2, 0xCD9E8D57u);
    c0 = (p1 >> 32) ^ c1 ^ (uint64_t)k0;
    c2 = (p0 >> 32) ^ c3 ^ (uint64_t)k1;
    c1 = p1;
    c3 = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  word[0] = c0;
  word[1] = c1;
  word[2] = c2;
  word[3] = c3;
}

// the words of ids first .. first + 31; first is a multiple of 4
static inline void words32(int64_t first, const NoiseKey& key, U out[2]) {
  UL word[4];
  philox8(UL{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(first / 4), key, word);
  const UL low = UL{} + 0xffffffffull;
  const UL even = (word[0] & low) | word[1] << 32, odd = (word[2] & low) | word[3] << 32;
  out[0] = (U)__builtin_shuffle(even, odd, UL{0, 8, 1, 9, 2, 10, 3, 11});
  out[1] = (U)__builtin_shuffle(even, odd, UL{4, 12, 5, 13, 6, 14, 7, 15});
}

static inline F8 gumbel8(UL word) {
  const D u = (__builtin_convertvector((L)word, D) + 0.5) * 0x1p-32;
  return __builtin_convertvector(-vlog(-vlog(u)), F8);
}
static inline float gumbel(uint32_t word) { return gumbel8(UL{} + (uint64_t)word)[0]; }

static void noise(int64_t seed, int64_t draw, int64_t choice, int64_t purpose, int64_t vocab, float* out) {
  const NoiseKey key{seed, draw, choice, purpose};
  for (int64_t id = 0; id < vocab; id += 32) {
    U word[2];
    words32(id, key, word);
    uint32_t w[32];
    float g[32];
    memcpy(w, word, 128);
    for (int i = 0; i < 32; i += 8) {
      UL wide;
      for (int j = 0; j < 8; j++) wide[j] = w[i + j];
      const F8 v = gumbel8(wide);
      memcpy(g + i, &v, 32);
    }
    memcpy(out + id, g, 4 * (size_t)lesser(32, vocab - id));
  }
}

// --------------------------------------------------------------------------------------------- draws

// The largest of x; groups[j] is the largest of group j of `up(n, 64 * fold) / (64 * fold) * 16`, `4 * fold` ids each.
// No group where `groups` is null.
static float peak(const float* x, int64_t n, int64_t fold, float* groups) {
  F top = splat(-INFINITY);
  for (int64_t i = 0; i < n; i += 64 * fold) {
    F a[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    const int64_t end = lesser(n, i + 64 * fold);
    int64_t j = i;
    for (; j + 64 <= end; j += 64)
      for (int k = 0; k < 4; k++) a[k] = vmax(a[k], load(x + j + 16 * k));
    for (; j < end; j += 16) a[0] = vmax(a[0], load_or_never(x + j, end - j));
    const F most = vmax(vmax(a[0], a[1]), vmax(a[2], a[3]));
    if (groups) {
      store(groups, most);
      groups += 16;
    }
    top = vmax(top, most);
  }
  return largest(top);
}

// ids of logits that are not below `bound`, ascending, up to `limit` of them and the rest of a block of 64
static int64_t collect(const float* x, int64_t n, float bound, int64_t limit, int32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < n && count < limit; i += 64) {
    uint64_t hit = 0;
    for (int k = 0; k < 4; k++)
      hit |= (uint64_t)not_below(load_or_never(x + i + 16 * k, n - i - 16 * k), splat(bound)) << 16 * k;
    if (n - i < 64) hit &= ((uint64_t)1 << (n - i)) - 1;
    for (; hit; hit &= hit - 1) ids[count++] = (int32_t)(i + __builtin_ctzll(hit));
  }
  return count;
}

static inline double weight1(float logit, float temperature, float top) {
  return vexp64(D{} + ((double)(logit / temperature) - (double)top))[0];
}

// weight[i] = exp(logit[i] / T - top) in fp64
static void weights(const float* logit, int64_t n, float temperature, float top, double* weight) {
  for (int64_t i = 0; i < n; i += 8) {
    F8 x = F8{};
    const size_t m = (size_t)lesser(8, n - i);
    memcpy(&x, logit + i, 4 * m);
    const D w = vexp64(__builtin_convertvector(x / temperature, D) - (double)top);
    memcpy(weight + i, &w, 8 * m);
  }
}

// lanes of the stable order before the cut, for ids i .. i + 15
static inline I before(const Cut& cut, F x, int64_t i) {
  const I id = I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)i;
  return (I)(x > cut.logit) | ((I)(x == cut.logit) & (I)(id < (int32_t)cut.id));
}

// Weights of the ids before each of two cuts, summed in one order: lane by lane of 8, then the lanes in one tree. An
// id that is not before the cut adds 0, so the sum never falls as the cut moves back.
static void mass(const float* logits, int64_t n, float temperature, float top, const Cut cut[2], double sum[2]) {
  D a[2] = {D{}, D{}};
  for (int64_t i = 0; i < n; i += 16) {
    const F x = load_or_never(logits + i, n - i);
    const F scaled = x / temperature;
    const I in[2] = {before(cut[0], x, i), before(cut[1], x, i)};
    for (int h = 0; h < 16; h += 8) {
      D wide;
      L m0, m1;
      for (int j = 0; j < 8; j++) wide[j] = scaled[h + j], m0[j] = in[0][h + j], m1[j] = in[1][h + j];
      const L w = (L)vexp64(wide - (double)top);
      a[0] += (D)(w & m0);
      a[1] += (D)(w & m1);
    }
  }
  for (int c = 0; c < 2; c++)
    sum[c] = ((a[c][0] + a[c][4]) + (a[c][2] + a[c][6])) + ((a[c][1] + a[c][5]) + (a[c][3] + a[c][7]));
}

// About the same in fp32, each weight and sum within the relative error that is returned. It filters: whoever is
// decided by less asks `mass`.
static double rough_mass(const float* logits, int64_t n, float temperature, float top, const Cut cut[2],
                         double sum[2]) {
  const F inverse = splat(1.0f / temperature), least = splat(-top);
  F a = F{}, b = F{};
  for (int64_t i = 0; i < n; i += 16) {
    const F x = load_or_never(logits + i, n - i);
    const F w = vexp(fma(x, inverse, least));
    a += (F)((I)w & before(cut[0], x, i));
    b += (F)((I)w & before(cut[1], x, i));
  }
  sum[0] = sum16(a);
  sum[1] = sum16(b);
  // weights: exp 2^-22, its argument 3 roundings of at most |top| + 87; sums: a rounding per block
  return 1e-5 + 4e-7 * (fabs((double)top) + 100) + 6e-8 * (double)(n / 16);
}

// argmax of fp32(logit / T) + G over the ids before the cut that min_p leaves, ties to the lowest id; `best_id` is one
// of them. G is only computed where it could win: with v = about 1 - u, G >= d needs -log u <= exp(-d), and 1 - u <=
// -log u, so v > exp(-d) cannot. exp is bounded from above by the straight line between powers of two. G < 23, so low
// logits are passed over without a word of noise. The slack covers the roundings of the test and of the score.
static int64_t draw(const float* logits, int64_t n, float temperature, float top, int64_t best_id, const Cut& cut,
                    double min_p, const NoiseKey& key) {
  U word[2];
  uint32_t w[32];
  words32(best_id / 32 * 32, key, word);
  memcpy(w, word, 128);
  float best = logits[best_id] / temperature + gumbel(w[best_id % 32]);
  const float one = 127 * 0x1p23f, scale = 0x1.715476p23f;  // bits of 1.0; 2^23 / log 2
  const F slope = splat(scale / temperature);
  float floor = cut.logit;
  if (min_p > 0) {
    const double least = (double)top + log(min_p) - 1e-4 - 1e-6 * fabs((double)top);
    floor = fmaxf(floor, (float)(least * temperature - 1e-6 * fabs(least * temperature)));
  }
  float low = 0, offset = 0;
  const auto aim = [&] {
    const float slack = 1e-3f + 1e-6f * (fabsf(best) + fabsf(top));
    const float least = (best - 23.0f - slack) * temperature;
    low = fmaxf(floor, least - 1e-6f * fabsf(least));
    offset = one + 1024.0f + scale * (slack - best);
  };
  aim();
  for (int64_t i = 0; i < n; i += 32) {
    const F x[2] = {load_or_never(logits + i, n - i), load_or_never(logits + i + 16, n - i - 16)};
    const uint32_t reach = not_below(x[0], splat(low)) | (uint32_t)not_below(x[1], splat(low)) << 16;
    if (!reach) continue;
    words32(i, key, word);
    uint32_t pass = 0;
    for (int h = 0; h < 2; h++) {
      const F v = (__builtin_convertvector((I)(~word[h] >> 1), F) + 0.25f) * 0x1p-31f;
      const F line = vmin(vmax(splat(0), fma(x[h], slope, splat(offset))), splat(one));
      pass |= (uint32_t)not_below((F)__builtin_convertvector(line, I), v) << 16 * h;
    }
    pass &= reach;
    if (!pass) continue;
    memcpy(w, word, 128);
    for (; pass; pass &= pass - 1) {
      const int lane = __builtin_ctz(pass);
      const int64_t id = i + lane;
      if (id >= n) break;
      const float logit = logits[id];
      if (logit < cut.logit || (logit == cut.logit && id >= cut.id)) continue;
      const float score = logit / temperature + gumbel(w[lane]);
      if (!(score > best || (score == best && id < best_id))) continue;
      if (min_p > 0 && weight1(logit, temperature, top) < min_p) continue;
      best = score;
      best_id = id;
      aim();
    }
  }
  return best_id;
}

// the same over n listed ids, in any order
static int64_t draw_list(const int32_t* ids, const float* logits, int64_t n, float temperature, const NoiseKey& key) {
  float best = 0;
  int64_t best_id = -1;
  for (int64_t i = 0; i < n; i += 8) {
    const int64_t m = lesser(8, n - i);
    UL counter = UL{}, word[4], mine;
    for (int64_t j = 0; j < m; j++) counter[j] = (uint32_t)ids[i + j] / 4;
    philox8(counter, key, word);
    for (int64_t j = 0; j < 8; j++) mine[j] = word[j < m ? ids[i + j] % 4 : 0][j] & 0xffffffffu;
    const F8 g = gumbel8(mine);
    for (int64_t j = 0; j < m; j++) {
      const float score = logits[i + j] / temperature + g[j];
      if (best_id >= 0 && !(score > best || (score == best && ids[i + j] < best_id))) continue;
      best = score;
      best_id = ids[i + j];
    }
  }
  return best_id;
}

static const Sampler sampler = {peak, collect, weights, mass, rough_mass, draw, draw_list};

}  // namespace SPEC_NS
}  // namespace spec
