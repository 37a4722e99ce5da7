// The int8 format of specserve_kernels/int8.py: rows of activations as two digits, exact integer sums, embedding.
// Included by kernels.h. A packed panel of 32 outputs is 32 scales, 32 sums of weights times -128, then the weights as
// [k / 64][2 halves][16 groups of 4 k][16 outputs][4]: one such half is one AMX tile and 16 operands of VPDPBUSD.
// Quantized rows are [m / 8][8 rows of high digits, then of low ones][up(k, 64)], what pads k is zero: eight rows are one
// AMX tile.
#pragma once

namespace spec {
namespace SPEC_NS {

typedef int16_t S __attribute__((vector_size(64)));
typedef int8_t B __attribute__((vector_size(16)));

template <class T>
static void quantize_row(const T* x, int8_t* high, int8_t* low, float* scale, int64_t k) {
  U most = U{};  // of |x| as bits: ordered like the values, infinity and NaN above all
  for (int64_t i = 0; i < k; i += 16) {
    const U v = (U)(i + 16 <= k ? load(x + i) : load_n(x + i, (int)(k - i))) & 0x7fffffffu;
    most = v > most ? v : most;
  }
  uint32_t top = 0;
  for (int i = 0; i < 16; i++) top = most[i] > top ? most[i] : top;
  memset(high + k / 16 * 16, 0, up(k, 64) - k / 16 * 16);
  memset(low + k / 16 * 16, 0, up(k, 64) - k / 16 * 16);
  if (top >= 0x7f800000u) {
    memset(high, 0, k);
    memset(low, 0, k);
    *scale = NAN;
    return;
  }
  float largest;
  memcpy(&largest, &top, 4);
  if (largest < 0x1p-100f) largest = 0x1p-100f;
  *scale = largest / 32512.0f;
  const F factor = splat(32512.0f / largest), magic = splat(0x1.8p23f);
  for (int64_t i = 0; i < k; i += 16) {
    const F v = i + 16 <= k ? load(x + i) : load_n(x + i, (int)(k - i));
    const I whole = bits(v * factor + magic) - bits(magic);
    const I h = (whole + 128) >> 8;
    const B hb = __builtin_convertvector(h, B), lb = __builtin_convertvector(whole - h * 256, B);
    memcpy(high + i, &hb, 16);
    memcpy(low + i, &lb, 16);
  }
}

// where the high digits of a row are; its low ones follow eight rows later
static inline int64_t digit_row(int64_t row) { return row / 8 * 16 + row % 8; }

static void quantize(const void* x, int8_t* digits, float* scale, int64_t rows, int64_t k, int type, int tid,
                     int nth) {
  const int64_t kp = up(k, 64);
  for (int64_t r = share(rows, tid, nth); r < share(rows, tid + 1, nth); r++) {
    int8_t *d = digits + digit_row(r) * kp, *low = d + 8 * kp;
    if (type == kBf16)
      quantize_row((const bf16*)x + r * k, d, low, scale + r, k);
    else
      quantize_row((const float*)x + r * k, d, low, scale + r, k);
  }
}

// sums of high and low digits of one row with 32 outputs
static inline void put_sums(const Gemm& g, const float* scales, int64_t row, int64_t n0, I high0, I high1, I low0,
                            I low1) {
  const F by = splat(g.x_scale[row]);
  const F a = __builtin_convertvector(high0, F) * 256.0f + __builtin_convertvector(low0, F);
  const F b = __builtin_convertvector(high1, F) * 256.0f + __builtin_convertvector(low1, F);
  put_panel(g, row, n0, a * by * load(scales), b * by * load(scales + 16));
}

#ifdef SPEC_VNNI
// unsigned times signed: 128 is added to every digit, and the sum starts at what takes that away again
struct Weights4 {
  I w;
  explicit Weights4(const char* p) { memcpy(&w, p, 64); }
};
static inline I dot4(I sum, const Weights4& w, uint32_t digits) {
  return (I)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)(digits ^ 0x80808080u)), (__m512i)w.w);
}
static inline I sum_start(const int32_t* p) {
  I s;
  memcpy(&s, p, 64);
  return s;
}
#else
// two products of int8 fit int16: 2 * 128 * 127 < 2^15
struct Weights4 {
  S even, odd;
  explicit Weights4(const char* p) {
    S s;
    memcpy(&s, p, 64);
    even = (s << 8) >> 8;
    odd = s >> 8;
  }
};
static inline I dot4(I sum, const Weights4& w, uint32_t digits) {
  const S x = (S)(U{} + digits);
  const I t = (I)(((x << 8) >> 8) * w.even + (x >> 8) * w.odd);
  return sum + ((t << 16) >> 16) + (t >> 16);
}
static inline I sum_start(const int32_t*) { return I{}; }
#endif

// MR rows of one group of eight
template <int MR>
static void panel_int8(const Gemm& g, const char* panel, int64_t row, int64_t n0) {
  const int64_t kp = up(g.k, 64);
  const int8_t* x = (const int8_t*)g.x + digit_row(row) * kp;
  const int32_t* start = (const int32_t*)(panel + 128);
  I sum[MR][2][2];
  for (int m = 0; m < MR; m++)
    for (int d = 0; d < 2; d++)
      for (int h = 0; h < 2; h++) sum[m][d][h] = sum_start(start + 16 * h);
  for (int64_t i = 0; i < kp; i += 4) {
    const char* w = panel + kInt8Header + i / 64 * 2048 + i % 64 * 16;
    const Weights4 first(w), second(w + 1024);
    for (int m = 0; m < MR; m++)
      for (int d = 0; d < 2; d++) {
        uint32_t four;
        memcpy(&four, x + (m + 8 * d) * kp + i, 4);
        sum[m][d][0] = dot4(sum[m][d][0], first, four);
        sum[m][d][1] = dot4(sum[m][d][1], second, four);
      }
  }
  for (int m = 0; m < MR; m++)
    put_sums(g, (const float*)panel, row + m, n0, sum[m][0][0], sum[m][0][1], sum[m][1][0], sum[m][1][1]);
}

#ifdef SPEC_AVX512
constexpr int kInt8Rows = 4;
#else
constexpr int kInt8Rows = 1;  // 16 SSE registers
#endif

[[maybe_unused]] static void gemm_int8_generic(const Gemm& g, int tid, int nth) {
  const int64_t panels = up(g.n, kPanel) / kPanel, stride = int8_panel_bytes(g.k);
  for (int64_t n = share(panels, tid, nth); n < share(panels, tid + 1, nth); n++) {
    const char* panel = (const char*)g.packed + n * stride;
    int64_t m = 0;
    for (; m + kInt8Rows <= g.m; m += kInt8Rows) panel_int8<kInt8Rows>(g, panel, m, n * kPanel);
    for (; m < g.m; m++) panel_int8<1>(g, panel, m, n * kPanel);
  }
}

template <class T>
static void embed_int8_rows(const int64_t* ids, const int8_t* table, const float* scale, T* y, int64_t from,
                            int64_t to, int64_t dim) {
  for (int64_t r = from; r < to; r++)
    for (int64_t i = 0; i < dim; i += 16) {
      const int n = (int)lesser(16, dim - i);
      B b = B{};
      memcpy(&b, table + ids[r] * dim + i, n);
      store_n(y + r * dim + i, __builtin_convertvector(b, F) * scale[ids[r]], n);
    }
}

static void embed_int8(const int64_t* ids, const int8_t* table, const float* scale, void* y, int64_t rows,
                       int64_t dim, int type, int tid, int nth) {
  const int64_t from = share(rows, tid, nth), to = share(rows, tid + 1, nth);
  if (type == kBf16)
    embed_int8_rows(ids, table, scale, (bf16*)y, from, to, dim);
  else
    embed_int8_rows(ids, table, scale, (float*)y, from, to, dim);
}

}  // namespace SPEC_NS
}  // namespace spec
