// Every kernel, written once over vec.h and compiled once per instruction set (plain.cpp, avx512.cpp, amx.cpp).
// The rule they all keep: what is stored for a row is computed by one thread, by one sequence of operations, from
// that row's inputs. `tid` of `nth` threads takes a fixed share; which share is no part of any value.
#pragma once
#include <cmath>
#include <cstdlib>

#include "args.h"
#include "sample_vec.h"
#include "vec.h"

namespace spec {
namespace SPEC_NS {

static inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
static inline int64_t share(int64_t n, int t, int nth) { return n * t / nth; }

// Grows, is reused by the thread's next call, is never handed to another thread.
static char* thread_scratch(size_t bytes) {
  static thread_local char* buffer = nullptr;
  static thread_local size_t size = 0;
  if (bytes > size) {
    free(buffer);
    size = up(bytes, 4096);
    buffer = (char*)aligned_alloc(4096, size);
    if (!buffer) abort();
    memset(buffer, 0, size);
  }
  return buffer;
}

// ---------------------------------------------------------------------------------------------- GEMM

template <class T>
static inline void put16(T* y, F v, int64_t n, bool accumulate) {
  if (n >= 16) {
    if (accumulate) v = load(y) + rounded<T>(v);
    store(y, v);
  } else if (n > 0) {
    if (accumulate) v = load_n(y, (int)n) + rounded<T>(v);
    store_n(y, v, (int)n);
  }
}

// acc: 32 outputs of one row, starting at n0
static inline void put_panel(const Gemm& g, int64_t row, int64_t n0, F lo, F hi) {
  const int64_t left = g.n - n0, at = row * (g.y_stride ? g.y_stride : g.n) + n0;
  if (g.out_type == kBf16) {
    bf16* y = (bf16*)g.y + at;
    put16(y, lo, left, g.accumulate);
    put16(y + 16, hi, left - 16, g.accumulate);
  } else {
    float* y = (float*)g.y + at;
    put16(y, lo, left, g.accumulate);
    put16(y + 16, hi, left - 16, g.accumulate);
  }
}

}  // namespace SPEC_NS
}  // namespace spec

#include "int8.h"

namespace spec {
namespace SPEC_NS {

// bf16 panel: [k/32][2 halves][16 pairs of k][16 outputs][2]; x widened, zero up to a multiple of 2
template <int MR>
static void panel_bf16(const Gemm& g, const float* x, int64_t ldx, const bf16* p, int64_t row, int64_t n0) {
  F acc[MR][2] = {};
  const int64_t pairs = (g.k + 1) / 2;
  for (int64_t i = 0; i < pairs; i++) {
    const bf16* w = p + i / 16 * 1024 + i % 16 * 32;
    U u0, u1;
    memcpy(&u0, w, 64);
    memcpy(&u1, w + 512, 64);
    const F e0 = (F)(u0 << 16), e1 = (F)(u1 << 16), o0 = (F)(u0 & 0xffff0000u), o1 = (F)(u1 & 0xffff0000u);
    for (int m = 0; m < MR; m++) {
      const F a = splat(x[m * ldx + 2 * i]), b = splat(x[m * ldx + 2 * i + 1]);
      acc[m][0] = fma(b, o0, fma(a, e0, acc[m][0]));
      acc[m][1] = fma(b, o1, fma(a, e1, acc[m][1]));
    }
  }
  for (int m = 0; m < MR; m++) put_panel(g, row + m, n0, acc[m][0], acc[m][1]);
}

// fp32 panel: [k][32 outputs]
template <int MR>
static void panel_f32(const Gemm& g, const float* x, int64_t ldx, const float* p, int64_t row, int64_t n0) {
  F acc[MR][2] = {};
  for (int64_t i = 0; i < g.k; i++) {
    const F w0 = load(p + i * 32), w1 = load(p + i * 32 + 16);
    for (int m = 0; m < MR; m++) {
      const F a = splat(x[m * ldx + i]);
      acc[m][0] = fma(a, w0, acc[m][0]);
      acc[m][1] = fma(a, w1, acc[m][1]);
    }
  }
  for (int m = 0; m < MR; m++) put_panel(g, row + m, n0, acc[m][0], acc[m][1]);
}

template <int MR>
static inline void panel(const Gemm& g, const float* x, int64_t ldx, const char* p, int64_t row, int64_t n0) {
  if (g.type == kBf16)
    panel_bf16<MR>(g, x, ldx, (const bf16*)p, row, n0);
  else
    panel_f32<MR>(g, x, ldx, (const float*)p, row, n0);
}

#ifdef SPEC_AVX512
constexpr int kRowBlock = 8;
#else
constexpr int kRowBlock = 2;  // 16 SSE registers
#endif

static void rows_by_panel(const Gemm& g, const float* x, int64_t ldx, const char* p, int64_t row, int64_t rows,
                          int64_t n0) {
  int64_t m = 0;
  for (; m + kRowBlock <= rows; m += kRowBlock) panel<kRowBlock>(g, x + m * ldx, ldx, p, row + m, n0);
#ifdef SPEC_AVX512
  if (rows - m >= 4) {
    panel<4>(g, x + m * ldx, ldx, p, row + m, n0);
    m += 4;
  }
  if (rows - m >= 2) {
    panel<2>(g, x + m * ldx, ldx, p, row + m, n0);
    m += 2;
  }
#endif
  if (rows > m) panel<1>(g, x + m * ldx, ldx, p, row + m, n0);
}

static size_t panel_bytes(int64_t k, int type) {
  return type == kBf16 ? (size_t)up(k, 32) * kPanel * 2 : (size_t)k * kPanel * 4;
}

static void gemm_generic(const Gemm& g, int tid, int nth) {
  const int64_t panels = up(g.n, kPanel) / kPanel;
  const int64_t first = share(panels, tid, nth), last = share(panels, tid + 1, nth);
  if (first == last) return;
  const size_t stride = panel_bytes(g.k, g.type);
  const int64_t chunk = 64;  // rows that are widened at once; weights stream once per chunk
  const int64_t ldx = g.type == kBf16 ? up(g.k, 2) : g.k;
  float* wide = g.type == kBf16 ? (float*)thread_scratch((size_t)chunk * ldx * 4) : nullptr;
  for (int64_t m0 = 0; m0 < g.m; m0 += chunk) {
    const int64_t rows = lesser(chunk, g.m - m0);
    const float* x = (const float*)g.x + m0 * g.k;
    if (wide) {
      for (int64_t m = 0; m < rows; m++) {
        const bf16* from = (const bf16*)g.x + (m0 + m) * g.k;
        for (int64_t i = 0; i < g.k; i++) wide[m * ldx + i] = widen1(from[i]);
        if (ldx > g.k) wide[m * ldx + g.k] = 0;
      }
      x = wide;
    }
    for (int64_t n = first; n < last; n++)
      rows_by_panel(g, x, ldx, (const char*)g.packed + n * stride, m0, rows, n * kPanel);
  }
}

// ---------------------------------------------------------------------------------------------- rows

template <class T>
static void rms_norm_rows(const T* x, const T* w, T* y, int64_t from, int64_t to, int64_t dim, float eps) {
  for (int64_t r = from; r < to; r++) {
    const T* a = x + r * dim;
    T* b = y + r * dim;
    F sum = F{};
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16) {
      const F v = load(a + i);
      sum = fma(v, v, sum);
    }
    const int tail = (int)(dim - i);
    if (tail) {
      const F v = load_n(a + i, tail);
      sum = fma(v, v, sum);
    }
    const F inv = splat(1.0f / sqrtf(sum16(sum) / (float)dim + eps));
    for (i = 0; i + 16 <= dim; i += 16) store(b + i, rounded<T>(load(a + i) * inv) * load(w + i));
    if (tail) store_n(b + i, rounded<T>(load_n(a + i, tail) * inv) * load_n(w + i, tail), tail);
  }
}

static void rms_norm(const void* x, const void* w, void* y, int64_t rows, int64_t dim, float eps, int type, int tid,
                     int nth) {
  const int64_t from = share(rows, tid, nth), to = share(rows, tid + 1, nth);
  if (type == kBf16)
    rms_norm_rows((const bf16*)x, (const bf16*)w, (bf16*)y, from, to, dim, eps);
  else
    rms_norm_rows((const float*)x, (const float*)w, (float*)y, from, to, dim, eps);
}

template <class T>
static inline void rope16(const T* a, T* b, const float* table, int64_t half, int64_t i, int n) {
  const F x1 = load_n(a + i, n), x2 = load_n(a + half + i, n);
  const F c = load_n(table + i, n), s = load_n(table + half + i, n);
  store_n(b + i, fma(x1, c, -(x2 * s)), n);
  store_n(b + half + i, fma(x2, c, x1 * s), n);
}

template <class T>
static void rope_rows(const T* x, const int64_t* positions, const float* table, T* y, int64_t from, int64_t to,
                      int64_t heads, int64_t dim, int64_t x_stride, int64_t y_stride) {
  const int64_t half = dim / 2;
  for (int64_t r = from; r < to; r++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < half; i += 16)
        rope16(x + r * x_stride + h * dim, y + r * y_stride + h * dim, table + positions[r] * dim, half, i,
               (int)lesser(16, half - i));
}

static void rope(const void* x, const int64_t* positions, const float* table, void* y, int64_t rows, int64_t heads,
                 int64_t dim, int64_t x_stride, int64_t y_stride, int type, int tid, int nth) {
  const int64_t from = share(rows, tid, nth), to = share(rows, tid + 1, nth);
  if (type == kBf16)
    rope_rows((const bf16*)x, positions, table, (bf16*)y, from, to, heads, dim, x_stride, y_stride);
  else
    rope_rows((const float*)x, positions, table, (float*)y, from, to, heads, dim, x_stride, y_stride);
}

template <class T>
static inline void silu16(const T* x, T* y, int64_t inner, int64_t r, int64_t i, int n) {
  const F gate = load_n(x + r * 2 * inner + i, n), other = load_n(x + (r * 2 + 1) * inner + i, n);
  const F e = vexp((F)(bits(gate) | INT32_MIN));  // of -|gate|: no overflow on either side
  const I negative = gate < F{};
  const F top = (F)((bits(e) & negative) | (bits(splat(1.0f)) & ~negative));
  store_n(y + r * inner + i, gate * (top / (e + 1.0f)) * other, n);
}

static void silu_mul(const void* x, void* y, int64_t rows, int64_t inner, int64_t from, int64_t to, int type) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = from; i < to; i += 16) {
      const int n = (int)lesser(16, to - i);
      if (type == kBf16)
        silu16((const bf16*)x, (bf16*)y, inner, r, i, n);
      else
        silu16((const float*)x, (float*)y, inner, r, i, n);
    }
}

static void embed(const int64_t* ids, const void* table, void* y, int64_t rows, int64_t dim, int type, int tid,
                  int nth) {
  const size_t bytes = (size_t)dim * (type == kBf16 ? 2 : 4);
  for (int64_t r = share(rows, tid, nth); r < share(rows, tid + 1, nth); r++)
    memcpy((char*)y + r * bytes, (const char*)table + ids[r] * bytes, bytes);
}

// ----------------------------------------------------------------------------------------- attention
// Lanes are (row, query head) pairs. Keys come one after another in order of position; a lane that does not see a key
// is masked out of the operation, so the key's value, NaN included, cannot reach it.

struct Key {
  int64_t offset;  // of its first element in the cache
  int64_t mask;
};

static inline Mask row_mask(const Block& b, int64_t r) { return (Mask)(((1u << b.heads) - 1) << (r * b.heads)); }

static inline int64_t cache_offset(const AttentionArgs& a, int64_t sequence, int64_t kv_head, int64_t slot) {
  const int64_t page = a.page_table[sequence * a.table_stride + slot / a.page_size];
  return ((page * a.kv_heads + kv_head) * a.page_size + slot % a.page_size) * a.dim;
}

static int64_t max_keys(const AttentionArgs& a) { return kSplit + 16 * lesser(a.depth, kSplit); }

static size_t attention_scratch_generic(const AttentionArgs& a) {
  const int64_t keys = up(max_keys(a), 8);
  return (size_t)(keys * (sizeof(Key) + 64 + up(a.dim, 16) * 4) + a.dim * 64 + 256);
}

// prefix keys once for all lanes that see them, then each row's own tail keys
static int64_t list_keys(const AttentionArgs& a, const Block& b, int64_t kv_head, int64_t p0, Key* keys) {
  const int64_t seq = a.sequence[b.row];
  const int64_t p1 = lesser(p0 + kSplit, b.keys);
  int64_t n = 0;
  for (int64_t p = p0; p < p1; p++) {
    Mask mask = 0;
    for (int64_t r = 0; r < b.rows; r++)
      if (a.prefix_len[b.row + r] > p) mask |= row_mask(b, r);
    if (!mask) break;
    keys[n++] = Key{cache_offset(a, seq, kv_head, p), mask};
  }
  for (int64_t r = 0; r < b.rows; r++) {
    const int64_t row = b.row + r, prefix = a.prefix_len[row];
    for (int64_t j = p0 > prefix ? p0 - prefix : 0; j < a.tail_len[row] && prefix + j < p1; j++)
      keys[n++] = Key{cache_offset(a, seq, kv_head, a.tail_slots[row * a.depth + j]), row_mask(b, r)};
  }
  return n;
}

template <class T>
static inline const float* wide_row(const T* p, float* buffer, int64_t dim);
template <>
inline const float* wide_row<float>(const float* p, float*, int64_t) { return p; }
template <>
inline const float* wide_row<bf16>(const bf16* p, float* buffer, int64_t dim) {
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) store(buffer + d, load(p + d));
  for (; d < dim; d++) buffer[d] = widen1(p[d]);
  return buffer;
}

template <class T>
static void attention_split_typed(const AttentionArgs& a, const Block& b, int64_t kv_head, int64_t split,
                                  char* scratch, Partial out) {
  const int64_t dim = a.dim, group = a.heads / a.kv_heads, lanes = b.rows * b.heads;
  const int64_t ldw = up(dim, 16);
  float* scores = (float*)scratch;                 // [keys, 16]
  float* qt = scores + up(max_keys(a), 8) * 16;    // [dim, 16]
  float* wide = qt + dim * 16;                     // [keys, dim] of K, then of V
  Key* keys = (Key*)(wide + up(max_keys(a), 8) * ldw);
  const T* kc = (const T*)a.k_cache;
  const T* vc = (const T*)a.v_cache;
  const int64_t n = list_keys(a, b, kv_head, split * kSplit, keys);

  for (int64_t i = 0; i < 16; i++) {
    const T* q = (const T*)a.q + (b.row + i / b.heads) * a.q_stride + (kv_head * group + b.head + i % b.heads) * dim;
    for (int64_t d = 0; d < dim; d++) qt[d * 16 + i] = i < lanes ? widen1(q[d]) : 0.0f;
  }
  F top = splat(-INFINITY);
  for (int64_t j0 = 0; j0 < n; j0 += 8) {
    const float* k[8];
    for (int64_t j = 0; j < 8; j++)  // past the end: the last key again, its scores are not used
      k[j] = wide_row(kc + keys[lesser(j0 + j, n - 1)].offset, wide + j * ldw, dim);
    F acc[8] = {};
    for (int64_t d = 0; d < dim; d++) {
      const F q = load(qt + d * 16);
      for (int j = 0; j < 8; j++) acc[j] = fma(splat(k[j][d]), q, acc[j]);
    }
    for (int64_t j = 0; j < 8 && j0 + j < n; j++) {
      const F s = acc[j] * a.scale;
      store(scores + (j0 + j) * 16, s);
      top = select((Mask)keys[j0 + j].mask, vmax(top, s), top);
    }
  }
  F sum = F{};
  for (int64_t j = 0; j < n; j++) {
    const F p = vexp(load(scores + j * 16) - top);
    store(scores + j * 16, p);
    sum = select((Mask)keys[j].mask, sum + p, sum);
  }
  store(out.max, top);
  store(out.sum, sum);
  for (int64_t j = 0; j < n; j++) wide_row(vc + keys[j].offset, wide + j * ldw, dim);
  for (int64_t d0 = 0; d0 < dim; d0 += 8) {
    const int64_t width = lesser(8, dim - d0);
    F acc[8] = {};
    for (int64_t j = 0; j < n; j++) {
      const float* row = sizeof(T) == 4 ? (const float*)vc + keys[j].offset + d0 : wide + j * ldw + d0;
      const F p = load(scores + j * 16);
      const Mask mask = (Mask)keys[j].mask;
      if (width == 8)
        for (int d = 0; d < 8; d++) acc[d] = fma_where(mask, splat(row[d]), p, acc[d]);
      else
        for (int64_t d = 0; d < width; d++) acc[d] = fma_where(mask, splat(row[d]), p, acc[d]);
    }
    for (int64_t d = 0; d < width; d++) store(out.out + (d0 + d) * 16, acc[d]);
  }
}

static void attention_begin_generic(const AttentionArgs&, const Block*, int64_t, char*) {}

static void attention_split_generic(const AttentionArgs& a, const Piece& piece, const Piece*, char* scratch,
                                    float* partials) {
  for (int64_t i = 0; i < piece.count; i++) {
    const Block& b = piece.blocks[i];
    const Partial out = partial_at(partials + i * partial_floats(a.dim));
    if (b.keys <= piece.split * kSplit) continue;
    if (a.type == kBf16)
      attention_split_typed<bf16>(a, b, piece.kv_head, piece.split, scratch, out);
    else
      attention_split_typed<float>(a, b, piece.kv_head, piece.split, scratch, out);
  }
}

// state and partial: [16] maximum, [16] sum, [dim, 16] output
static inline void merge_factors(float* state, const Partial& p, bool first, F& keep, F& add) {
  const F top = first ? splat(-INFINITY) : load(state), other = load(p.max);
  const F most = vmax(top, other);
  keep = vexp(top - most);
  add = vexp(other - most);
  // a lane that saw nothing so far (in this split) keeps (adds) nothing; -inf - -inf would be NaN
  const I none = (I)(bits(top) == bits(splat(-INFINITY))), nothing = (I)(bits(other) == bits(splat(-INFINITY)));
  keep = (F)((I)keep & ~none);
  add = (F)((I)add & ~nothing);
  store(state, most);
  const F sum = first ? F{} : load(state + 16);
  store(state + 16, fma(sum, keep, load(p.sum) * add));
}

static void attention_merge_generic(const AttentionArgs& a, const Block&, float* state, const Partial& p, bool first) {
  F keep, add;
  merge_factors(state, p, first, keep, add);
  for (int64_t d = 0; d < a.dim; d++) {
    const F old = first ? F{} : load(state + 32 + d * 16);
    store(state + 32 + d * 16, fma(old, keep, load(p.out + d * 16) * add));
  }
}

template <class T>
static void attention_store_typed(const AttentionArgs& a, const Block& b, int64_t kv_head, const float* state) {
  const int64_t group = a.heads / a.kv_heads;
  const F sum = load(state + 16);
  for (int64_t d = 0; d < a.dim; d++) {
    const F o = load(state + 32 + d * 16) / sum;
    float lane[16];
    T value[16];
    memcpy(lane, &o, 64);
    store(value, o);
    for (int64_t i = 0; i < b.rows * b.heads; i++)
      ((T*)a.out)[((b.row + i / b.heads) * a.heads + kv_head * group + b.head + i % b.heads) * a.dim + d] = value[i];
  }
}

static void attention_store_generic(const AttentionArgs& a, const Block& b, int64_t kv_head, const float* state) {
  if (a.type == kBf16)
    attention_store_typed<bf16>(a, b, kv_head, state);
  else
    attention_store_typed<float>(a, b, kv_head, state);
}

[[maybe_unused]] static void thread_nothing() {}

}  // namespace SPEC_NS
}  // namespace spec
