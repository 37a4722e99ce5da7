// The kernels for x86-64 with AMX tiles: bf16 and int8 GEMMs and bf16 attention here, everything else as in avx512.cpp.
// One output is one tile element: TDPBF16PS adds 32 products to it in a fixed way, tile after tile in order of k, so
// its bits depend on neither the other rows of the tile nor how many tiles of rows there are. TDPBSSD adds 64, exactly.
#define SPEC_NS amx
#define SPEC_AVX512
#include "kernels.h"

namespace spec {
namespace amx {

// GCC's tile intrinsics do not say that they read memory: stores before them must be finished by hand.
static inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
  uint8_t pad[8];
};

static void thread_begin() {
  TileConfig c;
  memset(&c, 0, sizeof c);
  c.palette = 1;
  for (int i = 0; i < 8; i++) {
    c.bytes[i] = 64;
    c.rows[i] = 16;
  }
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

static void thread_end() { _tile_release(); }

template <bool b>
struct Yes {
  static constexpr bool value = b;
};

// Both formats have tiles of 16 rows of 64 bytes and panels of two weight tiles for each step of k.
struct RowTile {
  const char* x;
  int64_t stride;  // bytes
  int64_t rows;    // of the tile's 16 that exist
};

static inline void put_tile(const Gemm& g, const float* acc, int64_t row, int64_t rows, int64_t n0) {
  for (int64_t r = 0; r < rows; r++) put_panel(g, row + r, n0, load(acc + r * 16), load(acc + 256 + r * 16));
}

// acc: two tiles of sums of high digits, two of low ones
static inline void put_tile_int8(const Gemm& g, const float* scales, const float* acc, int64_t row, int64_t rows,
                                 int64_t n0) {
  for (int64_t r = 0; r < rows; r++) {
    const float* a = acc + r * 16;
    put_sums(g, scales, row + r, n0, bits(load(a)), bits(load(a + 256)), bits(load(a + 512)), bits(load(a + 768)));
  }
}

// Tiles [k0, k1) of k of one panel of 32 outputs, times one or two tiles of 16 rows. `acc` carries the sums from one
// range of k to the next in 32 bits, as they stood in the tiles: cutting k into ranges changes no bit.
// `fetch`: the first pass over the panel asks for it 16 KB ahead, as few rows wait for memory. The gain is unproven: all
// GEMMs of a forward at 1 row, two runs each on a busy machine, took 16.8 and 22.3 ms without, 15.2 and 17.2 ms with.
template <bool int8, bool two, bool fetch>
static inline void tiles(const char* p, int64_t k0, int64_t k1, const RowTile* x, float* acc) {
  if (k0 == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, acc, 64);
    _tile_loadd(1, acc + 256, 64);
    if (two) {
      _tile_loadd(2, acc + 512, 64);
      _tile_loadd(3, acc + 768, 64);
    }
  }
  const char *a = x[0].x, *b = two ? x[1].x : nullptr;
  const int64_t lda = x[0].stride, ldb = two ? x[1].stride : 0;
  for (int64_t k = k0; k < k1; k++) {
    if (fetch)
      for (int i = 0; i < 32; i++) _mm_prefetch(p + (k + 8) * 2048 + i * 64, _MM_HINT_T0);
    _tile_loadd(6, p + k * 2048, 64);
    _tile_loadd(7, p + k * 2048 + 1024, 64);
    _tile_loadd(4, a + k * 64, lda);
    if (int8) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (two) {
      _tile_loadd(5, b + k * 64, ldb);
      if (int8) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, acc, 64);
  _tile_stored(1, acc + 256, 64);
  if (two) {
    _tile_stored(2, acc + 512, 64);
    _tile_stored(3, acc + 768, 64);
  }
}

// Panels [first, last) times `count` row tiles; in int8 a high and a low tile of the same rows follow each other.
template <bool int8>
static void run_panels(const Gemm& g, int64_t first, int64_t last, int64_t kt, const RowTile* tile, int64_t count,
                       float* acc) {
  const int64_t header = int8 ? kInt8Header : 0, stride = header + kt * 2048;
  // Many rows go over the panel again and again: 18 tiles of k of it are 36 KB and stay in L1. Few rows read it once.
  const int64_t ranges = count > 2 ? up(kt, 18) / 18 : 1, range = up(kt, ranges) / ranges;
  for (int64_t n = first; n < last; n++) {
    const char *panel = (const char*)g.packed + n * stride, *p = panel + header;
    for (int64_t k0 = 0; k0 < kt; k0 += range) {
      const int64_t k1 = lesser(k0 + range, kt);
      const auto go = [&](auto two, auto fetch, int64_t t) {
        float* sums = acc + t * 512;
        tiles<int8, two.value, fetch.value>(p, k0, k1, tile + t, sums);
        if (k1 < kt) return;
        if (int8) return put_tile_int8(g, (const float*)panel, sums, t * 8, tile[t].rows, n * kPanel);
        put_tile(g, sums, t * 16, tile[t].rows, n * kPanel);
        if (two.value) put_tile(g, sums + 512, t * 16 + 16, tile[t + 1].rows, n * kPanel);
      };
      if (count == 1)
        go(Yes<false>{}, Yes<true>{}, 0);
      else
        go(Yes<true>{}, Yes<true>{}, 0);
      int64_t t = 2;
      for (; t + 2 <= count; t += 2) go(Yes<true>{}, Yes<false>{}, t);
      if (t < count) go(Yes<false>{}, Yes<false>{}, t);
    }
  }
}

// Whole tiles are read where they are; a ragged last one, or rows that are no multiple of 32 long, from a zero-padded
// copy that each thread makes for itself.
static void gemm_tiles(const Gemm& g, int tid, int nth) {
  if (g.type != kBf16) return gemm_generic(g, tid, nth);
  const int64_t panels = up(g.n, kPanel) / kPanel;
  const int64_t first = share(panels, tid, nth), last = share(panels, tid + 1, nth);
  if (first == last || !g.m) return;
  const int64_t kp = up(g.k, 32);
  const int64_t from = kp != g.k ? 0 : g.m / 16 * 16;  // rows from here on are copied
  const int64_t padded = up(g.m, 16) - from, count = up(g.m, 16) / 16;
  const size_t tile_bytes = up(count * sizeof(RowTile), 64), acc_bytes = (size_t)up(count, 2) * 512 * 4;
  char* scratch = thread_scratch(tile_bytes + acc_bytes + (size_t)padded * kp * 2);
  RowTile* tile = (RowTile*)scratch;
  float* acc = (float*)(scratch + tile_bytes);
  bf16* copy = (bf16*)(scratch + tile_bytes + acc_bytes);
  for (int64_t m = from; m < g.m; m++) {
    memcpy(copy + (m - from) * kp, (const bf16*)g.x + m * g.k, g.k * 2);
    memset(copy + (m - from) * kp + g.k, 0, (kp - g.k) * 2);
  }
  if (padded) memset(copy + (g.m - from) * kp, 0, (padded - (g.m - from)) * kp * 2);
  for (int64_t t = 0; t < count; t++)
    tile[t] = RowTile{(const char*)(t * 16 < from ? (const bf16*)g.x + t * 16 * g.k : copy + (t * 16 - from) * kp),
                      kp * 2, lesser(16, g.m - t * 16)};
  finish_stores();
  run_panels<false>(g, first, last, kp / 32, tile, count, acc);
}

static void gemm_int8_tiles(const Gemm& g, int tid, int nth) {
  const int64_t panels = up(g.n, kPanel) / kPanel;
  const int64_t first = share(panels, tid, nth), last = share(panels, tid + 1, nth);
  if (first == last || !g.m) return;
  const int64_t kp = up(g.k, 64), count = up(g.m, 16) / 16 * 2;
  const size_t tile_bytes = up(count * sizeof(RowTile), 64);
  char* scratch = thread_scratch(tile_bytes + (size_t)count * 512 * 4);
  RowTile* tile = (RowTile*)scratch;
  for (int64_t t = 0; t < count; t++)
    tile[t] = RowTile{(const char*)g.x + t % 2 * up(g.m, 16) * kp + t / 2 * 16 * kp, kp, lesser(16, g.m - t / 2 * 16)};
  finish_stores();
  run_panels<true>(g, first, last, kp / 64, tile, count, (float*)(scratch + tile_bytes));
}

// ----------------------------------------------------------------------------------------- attention
// A pass takes lanes whose keys lie in the same slots. Key j of a split is element j % 32 of chunk j / 32 of 32
// positions, whoever else is in the pass, so a lane's products meet the same tile elements in the same order alone and
// in company. A key that a lane does not see has weight 0 there and a finite V, which adds exactly nothing; where V is
// not finite, each row gets a pass of its own, in which what it does not see is zero.

constexpr int64_t kChunk = 32;
constexpr int64_t kChunks = kSplit / kChunk;

static bool tile_attention(const AttentionArgs& a) {
  return a.type == kBf16 && a.dim % 32 == 0 && a.page_size % 16 == 0;
}

struct PassScratch {
  alignas(64) float scores[kSplit * 16];           // [key, lane]
  alignas(64) uint32_t weights[kChunks * 16 * 16];  // per chunk [lane, pair of keys]
  alignas(64) uint16_t values[4 * 512];            // four tiles [pair of keys, 16 of dim, 2]
  alignas(64) float out[4 * 256];                  // four tiles [lane, 16 of dim]
};
// then queries: dim / 32 tiles [pair of dim, lane, 2]; then gathered K and V, [kSplit, dim] each

static size_t attention_scratch_tiles(const AttentionArgs& a) {
  if (!tile_attention(a)) return attention_scratch_generic(a);
  return sizeof(PassScratch) + (size_t)a.dim * 32 + 2 * kSplit * a.dim * 2 + 128;
}

static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

static void pack_queries(const AttentionArgs& a, const Block& b, int64_t kv_head, uint32_t* queries) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t t = 0; t < a.dim / 32; t++) {
    __m512i r[16];
    int lane = 0;
    for (int64_t row = 0; row < b.rows; row++)
      for (int64_t h = 0; h < b.heads; h++, lane++)
        r[lane] = _mm512_loadu_si512((const bf16*)a.q + (b.row + row) * a.q_stride +
                                     (kv_head * group + b.head + h) * a.dim + t * 32);
    for (; lane < 16; lane++) r[lane] = _mm512_setzero_si512();
    transpose16(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(queries + t * 256 + i * 16, r[i]);
  }
}

// 16 keys each, consecutive in memory: where K and V of group i of a pass start
struct Groups {
  const bf16 *k[kSplit / 16], *v[kSplit / 16];
};

static void tile_scores(const AttentionArgs& a, const Groups& g, int64_t groups, const uint32_t* queries,
                        float* scores) {
  const int64_t stride = a.dim * 2;
  int64_t i = 0;
  for (; i + 4 <= groups; i += 4) {  // four sums at once hide the latency of each
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < a.dim / 32; t++) {
      _tile_loadd(7, queries + t * 256, 64);
      _tile_loadd(4, g.k[i] + t * 32, stride);
      _tile_dpbf16ps(0, 4, 7);
      _tile_loadd(5, g.k[i + 1] + t * 32, stride);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(6, g.k[i + 2] + t * 32, stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(4, g.k[i + 3] + t * 32, stride);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores + i * 256, 64);
    _tile_stored(1, scores + (i + 1) * 256, 64);
    _tile_stored(2, scores + (i + 2) * 256, 64);
    _tile_stored(3, scores + (i + 3) * 256, 64);
  }
  for (; i < groups; i++) {
    _tile_zero(0);
    for (int64_t t = 0; t < a.dim / 32; t++) {
      _tile_loadd(7, queries + t * 256, 64);
      _tile_loadd(4, g.k[i] + t * 32, stride);
      _tile_dpbf16ps(0, 4, 7);
    }
    _tile_stored(0, scores + i * 256, 64);
  }
}

// scores of `keys` keys -> maximum, sum and bf16 weights, lane by lane; key j is seen by lanes whose count is above j
static void tile_softmax(const AttentionArgs& a, int64_t keys, __m512i count, PassScratch* s, F& top, F& sum) {
  top = splat(-INFINITY);
  for (int64_t j = 0; j < keys; j++) {
    const F x = load(s->scores + j * 16) * a.scale;
    store(s->scores + j * 16, x);
    top = select(_mm512_cmpgt_epi32_mask(count, _mm512_set1_epi32((int)j)), vmax(top, x), top);
  }
  sum = F{};
  const F none = F{};
  for (int64_t c = 0; c * kChunk < keys; c++) {
    __m512i pair[16];
    for (int64_t i = 0; i < 16; i++) {
      U half[2] = {};
      for (int64_t h = 0; h < 2; h++) {
        const int64_t j = c * kChunk + 2 * i + h;
        if (j >= keys) continue;
        const Mask seen = _mm512_cmpgt_epi32_mask(count, _mm512_set1_epi32((int)j));
        const F p = rounded<bf16>(select(seen, vexp(load(s->scores + j * 16) - top), none));
        sum += p;
        half[h] = (U)p;
      }
      pair[i] = (__m512i)(half[0] >> 16 | half[1]);
    }
    transpose16(pair);
    for (int64_t i = 0; i < 16; i++) _mm512_store_si512(s->weights + c * 256 + i * 16, pair[i]);
  }
}

static inline bool finite32(__m512i v) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent) == 0;
}

// V of chunk c, columns d0 .. d0 + 32 * width, as tiles; keys from `keys` on are zero
static void tile_values(const AttentionArgs& a, const Groups& g, int64_t c, int64_t keys, int64_t d0, int64_t width,
                        uint16_t* values) {
  for (int64_t i = 0; i < 16; i++) {
    const int64_t j = c * kChunk + 2 * i;
    const bf16* v = j < keys ? g.v[j / 16] + j % 16 * a.dim + d0 : nullptr;
    for (int64_t t = 0; t < width; t++) {
      const __m512i even = j < keys ? _mm512_loadu_si512(v + t * 32) : _mm512_setzero_si512();
      const __m512i odd = j + 1 < keys ? _mm512_loadu_si512(v + a.dim + t * 32) : _mm512_setzero_si512();
      _mm512_store_si512(values + t * 1024 + i * 32, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(values + t * 1024 + 512 + i * 32, _mm512_unpackhi_epi16(even, odd));
    }
  }
}

// out: dim / 16 tiles [lane, 16]; tile 2t (2t + 1) holds columns 32t + 8i + 0..3 (4..7), i = 0..3
static void tile_output(const AttentionArgs& a, const Groups& g, int64_t keys, Mask lanes, PassScratch* s,
                        float* out) {
  for (int64_t d0 = 0; d0 < a.dim; d0 += 64) {
    const int64_t width = lesser(2, (a.dim - d0) / 32);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c * kChunk < keys; c++) {
      tile_values(a, g, c, keys, d0, width, s->values);
      finish_stores();
      _tile_loadd(4, s->weights + c * 256, 64);
      _tile_loadd(5, s->values, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, s->values + 512, 64);
      _tile_dpbf16ps(1, 4, 6);
      if (width == 2) {
        _tile_loadd(5, s->values + 1024, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, s->values + 1536, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, s->out, 64);
    _tile_stored(1, s->out + 256, 64);
    _tile_stored(2, s->out + 512, 64);
    _tile_stored(3, s->out + 768, 64);
    for (int64_t t = 0; t < 2 * width; t++)
      for (int lane = 0; lane < 16; lane++)
        if (lanes >> lane & 1) store(out + (d0 / 16 + t) * 256 + lane * 16, load(s->out + t * 256 + lane * 16));
  }
}

// Fills max, sum and output of `lanes`; `counts` keys of the split are seen by each lane, the same for a row's lanes.
static void tile_pass(const AttentionArgs& a, const Groups& g, const int32_t* counts, Mask lanes,
                      const uint32_t* queries, PassScratch* s, Partial out) {
  int64_t keys = 0;
  for (int i = 0; i < 16; i++)
    if (counts[i] > keys) keys = counts[i];
  F top, sum;
  tile_scores(a, g, up(keys, 16) / 16, queries, s->scores);
  tile_softmax(a, keys, _mm512_loadu_si512(counts), s, top, sum);
  store(out.max, select(lanes, top, load(out.max)));
  store(out.sum, select(lanes, sum, load(out.sum)));
  tile_output(a, g, keys, lanes, s, out.out);
}

// Keys that some rows of the pass see and others do not must hold finite V.
static bool mixed_values_finite(const AttentionArgs& a, const Groups& g, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; j++)
    for (int64_t d = 0; d < a.dim; d += 32)
      if (!finite32(_mm512_loadu_si512(g.v[j / 16] + j % 16 * a.dim + d))) return false;
  return true;
}

static void row_pass(const AttentionArgs& a, const Block& b, int64_t r, int64_t kv_head, int64_t p0,
                     const uint32_t* queries, bf16* gathered, PassScratch* s, Partial out) {
  const int64_t row = b.row + r, seq = a.sequence[row], prefix = a.prefix_len[row];
  const int64_t keys = lesser(kSplit, prefix + a.tail_len[row] - p0);
  if (keys <= 0) return;
  int32_t counts[16];
  const Mask lanes = row_mask(b, r);
  for (int i = 0; i < 16; i++) counts[i] = lanes >> i & 1 ? (int32_t)keys : 0;
  Groups g;
  for (int64_t i = 0; i * 16 < keys; i++) {
    if (p0 + i * 16 + 16 <= prefix) {
      const int64_t at = cache_offset(a, seq, kv_head, p0 + i * 16);
      g.k[i] = (const bf16*)a.k_cache + at;
      g.v[i] = (const bf16*)a.v_cache + at;
      continue;
    }
    bf16 *k = gathered + i * 16 * a.dim, *v = k + kSplit * a.dim;
    g.k[i] = k;
    g.v[i] = v;
    for (int64_t j = i * 16; j < i * 16 + 16; j++, k += a.dim, v += a.dim) {
      if (j >= keys) {
        memset(k, 0, a.dim * 2);
        continue;
      }
      const int64_t p = p0 + j, slot = p < prefix ? p : a.tail_slots[row * a.depth + p - prefix];
      const int64_t at = cache_offset(a, seq, kv_head, slot);
      memcpy(k, (const bf16*)a.k_cache + at, a.dim * 2);
      memcpy(v, (const bf16*)a.v_cache + at, a.dim * 2);
    }
  }
  finish_stores();
  tile_pass(a, g, counts, lanes, queries, s, out);
}

static void attention_split_tiles(const AttentionArgs& a, const Block& b, int64_t kv_head, int64_t split,
                                  char* scratch, Partial out) {
  if (!tile_attention(a)) return attention_split_generic(a, b, kv_head, split, scratch, out);
  PassScratch* s = (PassScratch*)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
  uint32_t* queries = (uint32_t*)(s + 1);
  bf16* gathered = (bf16*)(queries + a.dim * 8);
  const int64_t p0 = split * kSplit, seq = a.sequence[b.row];
  pack_queries(a, b, kv_head, queries);
  store(out.max, splat(-INFINITY));
  store(out.sum, F{});
  memset(out.out, 0, a.dim * 64);
  // rows whose keys in this split all lie at slot = position go together
  int32_t counts[16] = {};
  Mask lanes = 0;
  int64_t most = 0, least = kSplit;
  for (int64_t r = 0; r < b.rows; r++) {
    const int64_t prefix = a.prefix_len[b.row + r], seen = lesser(kSplit, prefix - p0);
    if (a.tail_len[b.row + r] && prefix < p0 + kSplit) continue;
    if (seen <= 0) continue;
    lanes |= row_mask(b, r);
    for (int64_t h = 0; h < b.heads; h++) counts[r * b.heads + h] = (int32_t)seen;
    most = seen > most ? seen : most;
    least = lesser(seen, least);
  }
  Groups g;
  for (int64_t i = 0; i * 16 < most; i++) {
    const int64_t at = cache_offset(a, seq, kv_head, p0 + i * 16);
    g.k[i] = (const bf16*)a.k_cache + at;
    g.v[i] = (const bf16*)a.v_cache + at;
  }
  if (lanes && !mixed_values_finite(a, g, least, most)) lanes = 0;
  finish_stores();
  if (lanes) tile_pass(a, g, counts, lanes, queries, s, out);
  for (int64_t r = 0; r < b.rows; r++)
    if (!(lanes & row_mask(b, r))) row_pass(a, b, r, kv_head, p0, queries, gathered, s, out);
}

static void attention_merge_tiles(const AttentionArgs& a, const Block& b, float* state, const Partial& p, bool first) {
  if (!tile_attention(a)) return attention_merge_generic(a, b, state, p, first);
  F keep, add;
  merge_factors(state, p, first, keep, add);
  for (int64_t lane = 0; lane < b.rows * b.heads; lane++) {
    const F k = splat(keep[lane]), n = splat(add[lane]);
    for (int64_t i = lane * 16; i < a.dim * 16; i += 256) {
      const F old = first ? F{} : load(state + 32 + i);
      store(state + 32 + i, fma(old, k, load(p.out + i) * n));
    }
  }
}

static void attention_store_tiles(const AttentionArgs& a, const Block& b, int64_t kv_head, const float* state) {
  if (!tile_attention(a)) return attention_store_generic(a, b, kv_head, state);
  const int64_t group = a.heads / a.kv_heads;
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t lane = 0; lane < b.rows * b.heads; lane++) {
    const F sum = splat(state[16 + lane]);
    bf16* out = (bf16*)a.out + ((b.row + lane / b.heads) * a.heads + kv_head * group + b.head + lane % b.heads) * a.dim;
    for (int64_t t = 0; t < a.dim / 32; t++) {
      const float* tile = state + 32 + t * 512 + lane * 16;
      const __m512 even = (__m512)(load(tile) / sum), odd = (__m512)(load(tile + 256) / sum);
      store(out + t * 32, (F)_mm512_permutex2var_ps(even, low, odd));
      store(out + t * 32 + 16, (F)_mm512_permutex2var_ps(even, high, odd));
    }
  }
}

}  // namespace amx

const Kernels* amx_kernels() {
  using namespace amx;
  static const Kernels table = {"amx",
                                thread_begin,
                                thread_end,
                                gemm_tiles,
                                gemm_int8_tiles,
                                quantize,
                                embed_int8,
                                embed,
                                rms_norm,
                                rope,
                                silu_mul,
                                attention_scratch_tiles,
                                attention_split_tiles,
                                attention_merge_tiles,
                                attention_store_tiles,
                                noise,
                                sampler};
  return &table;
}
}  // namespace spec
