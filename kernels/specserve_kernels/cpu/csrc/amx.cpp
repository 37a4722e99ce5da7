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

// Five registers, of the eight that there are: two sums and three operands. In a cloud the other thread of our core is
// another virtual core, and both seem to rename out of one file: a product took 15 ns with up to five in use, 18 with
// six, 21 with seven and 27 with eight, and a register once used counts until it is zeroed. In moments when nobody shared
// the core it was 7 whatever the number.
constexpr int kTiles = 5;

static void thread_begin() {
  TileConfig c;
  memset(&c, 0, sizeof c);
  c.palette = 1;
  for (int i = 0; i < kTiles; i++) {
    c.bytes[i] = 64;
    c.rows[i] = 16;
  }
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

static void thread_end() { _tile_release(); }

// Both formats have tiles of 16 rows of 64 bytes and panels of two weight tiles for each step of k.
struct RowTile {
  const char* x;
  int64_t stride;  // bytes
  int64_t rows;    // of the matrix that are in it
};

static inline void put_tile(const Gemm& g, const float* acc, int64_t row, int64_t rows, int64_t n0) {
  for (int64_t r = 0; r < rows; r++) put_panel(g, row + r, n0, load(acc + r * 16), load(acc + 256 + r * 16));
}

// a tile's first eight rows are sums of high digits, the others of low ones
static inline void put_tile_int8(const Gemm& g, const float* scales, const float* acc, int64_t row, int64_t rows,
                                 int64_t n0) {
  for (int64_t r = 0; r < rows; r++) {
    const float* a = acc + r * 16;
    put_sums(g, scales, row + r, n0, bits(load(a)), bits(load(a + 256)), bits(load(a + 128)), bits(load(a + 384)));
  }
}

// Tiles [k0, k1) of k of one panel of 32 outputs, times a tile of 16 rows. `acc` carries the sums from one range of k to
// the next in 32 bits, as they stood in the tiles: cutting k into ranges changes no bit.
// `from`, `to`: which lines of each step of k the pass asks for 32 KB ahead, as few rows wait for memory. Into L2: in L1
// it drove out the rows. All GEMMs of a forward at 1 and 16 rows took 12.9 ms so, 13.4 from 64 KB, 13.9 from 16 KB, and
// 14.6 from 16 KB into L1 (interleaved processes, machine at half speed; at full speed 9.8 against 12.3). Several passes
// over a panel ask for equal parts of it, or memory would have nothing to do from the second on: 5 % of a step in int8.
template <bool int8>
static inline void tiles(const char* p, int64_t k0, int64_t k1, const RowTile& x, int64_t from, int64_t to,
                         float* acc) {
  if (k0 == 0) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, acc, 64);
    _tile_loadd(1, acc + 256, 64);
  }
  for (int64_t k = k0; k < k1; k++) {
    for (int64_t i = from; i < to; i++) _mm_prefetch(p + (k + 16) * 2048 + i * 64, _MM_HINT_T1);
    _tile_loadd(2, x.x + k * 64, x.stride);
    _tile_loadd(3, p + k * 2048, 64);
    _tile_loadd(4, p + k * 2048 + 1024, 64);
    if (int8) {
      _tile_dpbssd(0, 2, 3);
      _tile_dpbssd(1, 2, 4);
    } else {
      _tile_dpbf16ps(0, 2, 3);
      _tile_dpbf16ps(1, 2, 4);
    }
  }
  _tile_stored(0, acc, 64);
  _tile_stored(1, acc + 256, 64);
}

// Panels [first, last) times `count` row tiles.
template <bool int8>
static void run_panels(const Gemm& g, int64_t first, int64_t last, int64_t kt, const RowTile* tile, int64_t count,
                       float* acc) {
  const int64_t header = int8 ? kInt8Header : 0, stride = header + kt * 2048;
  // Several tiles go over the panel again and again: 18 tiles of k of it are 36 KB and stay in L1. One reads it once.
  const int64_t ranges = count > 1 ? up(kt, 18) / 18 : 1, range = up(kt, ranges) / ranges;
  for (int64_t n = first; n < last; n++) {
    const char *panel = (const char*)g.packed + n * stride, *p = panel + header;
    for (int64_t k0 = 0; k0 < kt; k0 += range) {
      const int64_t k1 = lesser(k0 + range, kt);
      for (int64_t t = 0; t < count; t++) {
        float* sums = acc + t * 512;
        tiles<int8>(p, k0, k1, tile[t], 32 * t / count, 32 * (t + 1) / count, sums);
        if (k1 < kt) continue;
        if (int8)
          put_tile_int8(g, (const float*)panel, sums, t * 8, tile[t].rows, n * kPanel);
        else
          put_tile(g, sums, t * 16, tile[t].rows, n * kPanel);
      }
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
  const size_t tile_bytes = up(count * sizeof(RowTile), 64), acc_bytes = (size_t)count * 512 * 4;
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
  const int64_t kp = up(g.k, 64), count = up(g.m, 8) / 8;
  const size_t tile_bytes = up(count * sizeof(RowTile), 64);
  char* scratch = thread_scratch(tile_bytes + (size_t)count * 512 * 4);
  RowTile* tile = (RowTile*)scratch;
  for (int64_t t = 0; t < count; t++)
    tile[t] = RowTile{(const char*)g.x + t * 16 * kp, kp, lesser(8, g.m - t * 8)};
  finish_stores();
  run_panels<true>(g, first, last, kp / 64, tile, count, (float*)(scratch + tile_bytes));
}

// ----------------------------------------------------------------------------------------- attention
// A pass takes lanes whose keys lie in the same slots. Key j of a split is element j % 32 of chunk j / 32 of 32
// positions, whoever else is in the pass, so a lane's products meet the same tile elements in the same order alone and
// in company. A key that a lane does not see has weight 0 there and a finite V, which adds exactly nothing. Rows that see
// other keys than their neighbours (a tail), or that must not meet a V that is not finite, share a pass as far as all of
// them see the same, and end it alone, where what they do not see is zero. All blocks of a piece share V as tiles want
// it; softmax goes lane by lane, 16 keys at once, and skips lanes that do not exist.

constexpr int64_t kChunk = 32;
constexpr int64_t kChunks = kSplit / kChunk;
constexpr int64_t kGroups = kSplit / 16;

static bool tile_attention(const AttentionArgs& a) {
  return a.type == kBf16 && a.dim % 32 == 0 && a.page_size % 16 == 0;
}

struct PassScratch {
  alignas(64) float scores[kSplit * 16];            // [key, lane]
  alignas(64) float rows[4 * kSplit];               // of four lanes at a time [lane, key], times scale * log2(e)
  alignas(64) uint32_t weights[kChunks * 16 * 16];  // per chunk [lane, pair of keys]
  alignas(64) float own_scores[kSplit * 16];        // as `scores`, while one row of many is alone
  alignas(64) float out[2 * 256];                   // two tiles [lane, 16 of dim]
};
// then queries: of each kv head, of each block, dim / 32 tiles [pair of dim, lane, 2]; then V as tiles, of each chunk
// dim / 16 tiles [pair of keys, 16 of dim, 2], once for all and once for a row alone; then the keys, later the values,
// that a row sees alone, gathered, [kSplit, dim]; then dim / 16 tiles of sums over what all see

static int64_t query_words(const AttentionArgs& a) { return a.dim * 8; }

static size_t attention_scratch_tiles(const AttentionArgs& a) {
  if (!tile_attention(a)) return attention_scratch_generic(a);
  const int64_t queries = a.kv_heads * kCluster * query_words(a) * 4;
  return sizeof(PassScratch) + (size_t)(queries + 3 * kSplit * a.dim * 2 + a.dim * 64) + 128;
}

struct Scratch {
  PassScratch* pass;
  uint32_t* queries;
  bf16 *values, *own_values, *gathered;
  float* sums;
};

static Scratch scratch_at(const AttentionArgs& a, char* memory) {
  Scratch s;
  s.pass = (PassScratch*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
  s.queries = (uint32_t*)(s.pass + 1);
  s.values = (bf16*)(s.queries + a.kv_heads * kCluster * query_words(a));
  s.own_values = s.values + kSplit * a.dim;
  s.gathered = s.own_values + kSplit * a.dim;
  s.sums = (float*)(s.gathered + kSplit * a.dim);
  return s;
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

static void attention_begin_tiles(const AttentionArgs& a, const Block* blocks, int64_t count, char* memory) {
  if (!tile_attention(a)) return;
  uint32_t* queries = scratch_at(a, memory).queries;
  for (int64_t h = 0; h < a.kv_heads; h++)
    for (int64_t i = 0; i < count; i++) pack_queries(a, blocks[i], h, queries + (h * kCluster + i) * query_words(a));
  finish_stores();
}

// 16 keys each, consecutive in memory: where K and V of group i of a pass start
struct Groups {
  const bf16 *k[kGroups], *v[kGroups];
  int64_t count = 0;
};

static void prefix_groups(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t p0, int64_t keys, Groups& g) {
  g.count = up(keys, 16) / 16;
  const int32_t* page = a.page_table + seq * a.table_stride + p0 / a.page_size;
  for (int64_t i = 0, slot = p0 % a.page_size; i < g.count; i++) {
    const int64_t at = ((*page * a.kv_heads + kv_head) * a.page_size + slot) * a.dim;
    g.k[i] = (const bf16*)a.k_cache + at;
    g.v[i] = (const bf16*)a.v_cache + at;
    slot += 16;
    if (slot < a.page_size) continue;
    slot = 0;
    page++;
  }
}

// K and V lie anywhere in the pool, so no hardware prefetcher follows from page to page: while one piece is computed,
// the lines of the next are asked for a few at a time, since a core holds only some 16 requests at once. On one thread
// attention over 16 x 2,048 tokens took 79 ms without, 86 with all K asked for at once and then all V, 78 into L1 and
// 73 into L2 (reading as many bytes in order took 52).
struct Fetch {
  const char* at[2 * kGroups];
  int64_t left = 0, offset = 0, bytes = 0;  // groups from at[left - 1] down, bytes of each
  void add(const Groups& g, int64_t dim) {
    bytes = dim * 32;
    for (int64_t i = g.count; i-- > 0;) at[left++] = (const char*)g.v[i];
    for (int64_t i = g.count; i-- > 0;) at[left++] = (const char*)g.k[i];
  }
  inline void lines(int64_t n) {
    if (!left) return;
    const char* p = at[left - 1] + offset;
    for (int64_t i = 0; i < n; i++) _mm_prefetch(p + i * 64, _MM_HINT_T1);
    offset += n * 64;
    if (offset < bytes) return;
    offset = 0;
    left--;
  }
};

static void tile_scores(const AttentionArgs& a, const Groups& g, int64_t groups, const uint32_t* queries,
                        Fetch& fetch, float* scores) {
  const int64_t stride = a.dim * 2;
  for (int64_t i = 0; i < groups; i += 2) {
    const bool two = i + 1 < groups;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t t = 0; t < a.dim / 32; t++) {
      _tile_loadd(2, queries + t * 256, 64);
      _tile_loadd(3, g.k[i] + t * 32, stride);
      _tile_dpbf16ps(0, 3, 2);
      if (two) {
        _tile_loadd(4, g.k[i + 1] + t * 32, stride);
        _tile_dpbf16ps(1, 4, 2);
      }
      fetch.lines(8);
    }
    _tile_stored(0, scores + i * 256, 64);
    if (two) _tile_stored(1, scores + (i + 1) * 256, 64);
    fetch.lines(8);
  }
}

// 2^x of x <= 127, off by 4e-6 of it at most, which a rounding to bf16 is 500 times; 2^0 = 1 exactly, NaN survives
static inline F exp2_16(F x) {
  const F r = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x), of -inf 0
  F p = splat(1.3426688611e-2f);
  p = fma(p, r, splat(5.2242467163e-2f));
  p = fma(p, r, splat(2.4128020813e-1f));
  p = fma(p, r, splat(6.9304484446e-1f));
  p = fma(p, r, splat(1.0f));
  return (F)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
}

static inline float max16(F x) {
  F y = vmax(x, (F)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e));
  y = vmax(y, (F)_mm512_shuffle_f32x4((__m512)y, (__m512)y, 0xb1));
  y = vmax(y, (F)_mm512_permute_ps((__m512)y, 0x4e));
  y = vmax(y, (F)_mm512_permute_ps((__m512)y, 0xb1));
  return y[0];
}

static inline float tree_sum16(F x) {
  F y = x + (F)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e);
  y = y + (F)_mm512_shuffle_f32x4((__m512)y, (__m512)y, 0xb1);
  y = y + (F)_mm512_permute_ps((__m512)y, 0x4e);
  y = y + (F)_mm512_permute_ps((__m512)y, 0xb1);
  return y[0];
}

// scores [16 keys, lane], times c -> four lanes of 16 keys, kSplit apart
static inline void turn_scores(const float* scores, F c, float* rows) {
  __m512 v[4];  // part i of v[j] is of key 4i + j
  for (int j = 0; j < 4; j++) {
    v[j] = _mm512_broadcast_f32x4(_mm_load_ps(scores + j * 16));
    v[j] = _mm512_mask_broadcast_f32x4(v[j], 0x00f0, _mm_load_ps(scores + (j + 4) * 16));
    v[j] = _mm512_mask_broadcast_f32x4(v[j], 0x0f00, _mm_load_ps(scores + (j + 8) * 16));
    v[j] = _mm512_mask_broadcast_f32x4(v[j], 0xf000, _mm_load_ps(scores + (j + 12) * 16));
  }
  const __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpacklo_ps(v[2], v[3]);
  const __m512 d = _mm512_unpackhi_ps(v[0], v[1]), e = _mm512_unpackhi_ps(v[2], v[3]);
  store(rows, (F)_mm512_shuffle_ps(a, b, 0x44) * c);
  store(rows + kSplit, (F)_mm512_shuffle_ps(a, b, 0xee) * c);
  store(rows + 2 * kSplit, (F)_mm512_shuffle_ps(d, e, 0x44) * c);
  store(rows + 3 * kSplit, (F)_mm512_shuffle_ps(d, e, 0xee) * c);
}

static inline Mask first_keys(int64_t n) { return n >= 16 ? 0xffff : (Mask)((1u << (n < 0 ? 0 : n)) - 1); }

// One lane: 16 keys a vector, of which it sees `count` in all; `chunks` chunks of weights are written. `whole`: it sees
// every key of them, so that nothing needs to be masked.
template <bool whole>
static inline void lane_softmax(const float* row, int64_t count, int64_t chunks, uint32_t* weights, float* max,
                                float* sum) {
  const auto seen = [&](int64_t g, F yes, F no) { return whole ? yes : select(first_keys(count - g * 16), yes, no); };
  F top = splat(-INFINITY);
  for (int64_t g = 0; g < 2 * chunks; g++) top = seen(g, vmax(top, load(row + g * 16)), top);
  top = splat(max16(top));
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 total = _mm512_setzero_ps();
  for (int64_t c = 0; c < chunks; c++) {
    const F lo = seen(2 * c, exp2_16(load(row + c * 32) - top), F{});
    const F hi = seen(2 * c + 1, exp2_16(load(row + c * 32 + 16) - top), F{});
    const __m512bh pair = _mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
    _mm512_store_si512(weights + c * 256, (__m512i)pair);
    total = _mm512_dpbf16_ps(total, pair, one);
  }
  *max = top[0];
  *sum = tree_sum16((F)total);
}

// scores of `keys` keys -> maximum, sum and bf16 weights of `lanes`; lane i sees the first counts[i]
static void tile_softmax(const AttentionArgs& a, int64_t keys, const int32_t* counts, Mask lanes, PassScratch* s,
                         Fetch& fetch, Partial out) {
  const F c = splat(a.scale * 1.44269504088896341f);
  const int64_t chunks = up(keys, kChunk) / kChunk;
  for (int first = 0; first < 16; first += 4) {
    if (!(lanes >> first & 15)) continue;
    for (int64_t g = 0; g < 2 * chunks; g++) turn_scores(s->scores + g * 256 + first, c, s->rows + g * 16);
    for (int i = 0; i < 4; i++) {
      const int lane = first + i;
      fetch.lines(16);
      if (!(lanes >> lane & 1)) continue;
      const float* row = s->rows + i * kSplit;
      uint32_t* weights = s->weights + lane * 16;
      if (counts[lane] == kSplit)
        lane_softmax<true>(row, kSplit, kChunks, weights, out.max + lane, out.sum + lane);
      else
        lane_softmax<false>(row, counts[lane], chunks, weights, out.max + lane, out.sum + lane);
    }
  }
}

static inline bool finite32(__m512i v) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent) == 0;
}

// V as tiles [pair of keys, 16 of dim, 2]; keys from `keys` on are zero. Tile 2t (2t + 1) of a chunk holds columns
// 32t + 8i + 0..3 (4..7), i = 0..3.
static void tile_values(const AttentionArgs& a, const Groups& g, int64_t keys, Fetch& fetch, bf16* values) {
  const int64_t dim = a.dim;
  for (int64_t j0 = 0; j0 < keys; j0 += 16) {
    bf16* to = values + j0 / 32 * 32 * dim + j0 % 32 * 16;
    const bf16* v = g.v[j0 / 16];
    const int64_t pairs = lesser(keys - j0, 16) / 2;
    for (int64_t i = 0; i < pairs; i++)
      for (int64_t t = 0; t < dim / 32; t++) {
        const __m512i even = _mm512_loadu_si512(v + 2 * i * dim + t * 32);
        const __m512i odd = _mm512_loadu_si512(v + (2 * i + 1) * dim + t * 32);
        _mm512_store_si512(to + t * 1024 + i * 32, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + t * 1024 + 512 + i * 32, _mm512_unpackhi_epi16(even, odd));
      }
    for (int64_t i = pairs; i < 8; i++)
      for (int64_t t = 0; t < dim / 32; t++) {
        const __m512i zero = _mm512_setzero_si512();
        const __m512i even = j0 + 2 * i < keys ? _mm512_loadu_si512(v + 2 * i * dim + t * 32) : zero;
        _mm512_store_si512(to + t * 1024 + i * 32, _mm512_unpacklo_epi16(even, zero));
        _mm512_store_si512(to + t * 1024 + 512 + i * 32, _mm512_unpackhi_epi16(even, zero));
      }
    fetch.lines(16);
  }
  if (up(keys, 16) % 32)  // the second half of the last chunk
    for (int64_t t = 0; t < dim / 16; t++)
      memset(values + keys / 32 * 32 * dim + t * 512 + 256, 0, 512);
  finish_stores();
}

// out: dim / 16 tiles [lane, 16], columns as in `tile_values`; of `lanes` only, unless `all` say that none is kept.
// `sums`: as many tiles to go on from, null for zeros; then `values` begin with the keys of chunk `first`.
static void tile_output(const AttentionArgs& a, const bf16* values, int64_t first, int64_t keys, const float* sums,
                        Mask lanes, bool all, PassScratch* s, Fetch& fetch, float* out) {
  for (int64_t d0 = 0; d0 < a.dim; d0 += 32) {
    if (sums) {
      _tile_loadd(0, sums + d0 * 16, 64);
      _tile_loadd(1, sums + d0 * 16 + 256, 64);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (int64_t c = 0; c * kChunk < keys; c++) {
      const bf16* v = values + c * 32 * a.dim + d0 * 32;
      _tile_loadd(2, s->weights + (first + c) * 256, 64);
      _tile_loadd(3, v, 64);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(4, v + 512, 64);
      _tile_dpbf16ps(1, 2, 4);
      fetch.lines(8);
    }
    float *to = out + d0 * 16, *from = all ? to : s->out;
    _tile_stored(0, from, 64);
    _tile_stored(1, from + 256, 64);
    if (all) continue;
    for (int64_t t = 0; t < 2; t++)
      for (int lane = 0; lane < 16; lane++)
        if (lanes >> lane & 1) store(to + t * 256 + lane * 16, load(from + t * 256 + lane * 16));
  }
}

// Keys that some rows of the pass see and others do not must hold finite V.
static bool mixed_values_finite(const AttentionArgs& a, const Groups& g, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; j++)
    for (int64_t d = 0; d < a.dim; d += 32)
      if (!finite32(_mm512_loadu_si512(g.v[j / 16] + j % 16 * a.dim + d))) return false;
  return true;
}

// Keys, or values, of positions [from, from + keys) that a row sees, `from` a multiple of 16, in groups: where they are if
// they lie together, else one after another in `to`. What pads the last group is zero. Returns how many groups.
static int64_t gather(const AttentionArgs& a, int64_t row, int64_t kv_head, int64_t from, int64_t keys,
                      const void* cache, bf16* to, const bf16** groups) {
  const int64_t seq = a.sequence[row], prefix = a.prefix_len[row], count = up(keys, 16) / 16;
  const auto at = [&](int64_t slot) { return (const bf16*)cache + cache_offset(a, seq, kv_head, slot); };
  for (int64_t i = 0; i < count; i++) {
    const int64_t first = from + i * 16, seen = lesser(16, keys - i * 16);
    const int64_t together = prefix < first ? 0 : lesser(seen, prefix - first);  // a page holds whole groups
    if (together == 16) {
      groups[i] = at(first);
      continue;
    }
    groups[i] = to;
    if (together) memcpy(to, at(first), together * a.dim * 2);
    for (int64_t j = together; j < seen; j++)
      memcpy(to + j * a.dim, at(a.tail_slots[row * a.depth + first + j - prefix]), a.dim * 2);
    memset(to + seen * a.dim, 0, (16 - seen) * a.dim * 2);
    to += 16 * a.dim;
  }
  finish_stores();
  return count;
}

// Keys that a row sees in a split.
static int64_t keys_of(const AttentionArgs& a, int64_t row, int64_t p0) {
  return lesser(kSplit, a.prefix_len[row] + a.tail_len[row] - p0);
}

// Some `rows` (bits) of a block, all of which see the groups `g`; V of the whole chunks of these is in `s.values`.
static void apart_pass(const AttentionArgs& a, const Block& b, uint32_t rows, int64_t kv_head, int64_t p0,
                       const Groups& g, const uint32_t* queries, const Scratch& s, Partial out) {
  const int64_t chunks = g.count * 16 / kChunk;
  float* scores = s.pass->scores + g.count * 256;
  int32_t counts[16] = {};
  int64_t most = 0;
  Mask lanes = 0;
  Groups own;
  Fetch none;
  tile_scores(a, g, g.count, queries, none, s.pass->scores);
  for (int64_t r = 0; r < b.rows; r++) {
    if (!(rows >> r & 1)) continue;
    const int64_t keys = keys_of(a, b.row + r, p0);
    for (int64_t h = 0; h < b.heads; h++) counts[r * b.heads + h] = (int32_t)keys;
    const Mask mine = row_mask(b, r);
    lanes |= mine;
    most = keys > most ? keys : most;
    own.count = gather(a, b.row + r, kv_head, p0 + g.count * 16, keys - g.count * 16, a.k_cache, s.gathered, own.k);
    tile_scores(a, own, own.count, queries, none, s.pass->own_scores);
    for (int64_t j = 0; j < own.count * 256; j += 16)
      _mm512_mask_storeu_ps(scores + j, mine, _mm512_loadu_ps(s.pass->own_scores + j));
  }
  tile_softmax(a, most, counts, lanes, s.pass, none, out);
  finish_stores();
  tile_output(a, s.values, 0, chunks * kChunk, nullptr, 0, true, s.pass, none, s.sums);
  for (int64_t r = 0; r < b.rows; r++) {
    if (!(rows >> r & 1)) continue;
    const int64_t keys = keys_of(a, b.row + r, p0) - chunks * kChunk;
    gather(a, b.row + r, kv_head, p0 + chunks * kChunk, keys, a.v_cache, s.gathered, own.v);
    tile_values(a, own, keys, none, s.own_values);
    tile_output(a, s.own_values, chunks, keys, s.sums, row_mask(b, r), false, s.pass, none, out.out);
  }
}

// Which lanes of a block have all their keys of this split at slot = position, and how many each.
struct Together {
  alignas(64) int32_t counts[16];
  Mask lanes;
  int64_t most, least;
};

static Together together(const AttentionArgs& a, const Block& b, int64_t p0) {
  Together t = {{}, 0, 0, kSplit};
  for (int64_t r = 0; r < b.rows; r++) {
    const int64_t prefix = a.prefix_len[b.row + r], seen = lesser(kSplit, prefix - p0);
    if (a.tail_len[b.row + r] && prefix < p0 + kSplit) continue;
    if (seen <= 0) continue;
    t.lanes |= row_mask(b, r);
    for (int64_t h = 0; h < b.heads; h++) t.counts[r * b.heads + h] = (int32_t)seen;
    t.most = seen > t.most ? seen : t.most;
    t.least = lesser(seen, t.least);
  }
  return t;
}

static void attention_split_tiles(const AttentionArgs& a, const Piece& piece, const Piece* after, char* memory,
                                  float* partials) {
  if (!tile_attention(a)) return attention_split_generic(a, piece, after, memory, partials);
  const Scratch s = scratch_at(a, memory);
  const uint32_t* queries = s.queries + piece.kv_head * kCluster * query_words(a);
  const int64_t p0 = piece.split * kSplit, seq = a.sequence[piece.blocks->row];
  Together t[kCluster];
  int64_t most = 0, least = kSplit;
  for (int64_t i = 0; i < piece.count; i++) {
    t[i] = together(a, piece.blocks[i], p0);
    most = t[i].most > most ? t[i].most : most;
    least = lesser(t[i].least, least);
  }
  Groups g, next;
  Fetch fetch;
  prefix_groups(a, seq, piece.kv_head, p0, most, g);
  if (after) {
    const int64_t row = after->blocks->row, from = after->split * kSplit, seen = a.prefix_len[row] - from;
    if (seen > 0) prefix_groups(a, a.sequence[row], after->kv_head, from, lesser(kSplit, seen), next);
    fetch.add(next, a.dim);
  }
  const bool shared = most && mixed_values_finite(a, g, least, most);
  bool first = true;
  for (int64_t i = 0; i < piece.count; i++) {
    const Block& b = piece.blocks[i];
    if (b.keys <= p0) continue;
    const Partial out = partial_at(partials + i * partial_floats(a.dim));
    const Mask lanes = shared ? t[i].lanes : 0, all = (Mask)((1u << b.rows * b.heads) - 1);
    const uint32_t* q = queries + i * query_words(a);
    store(out.max, splat(-INFINITY));
    store(out.sum, F{});
    if (lanes != all) memset(out.out, 0, a.dim * 64);
    if (!lanes) continue;
    tile_scores(a, g, up(t[i].most, 16) / 16, q, fetch, s.pass->scores);
    tile_softmax(a, t[i].most, t[i].counts, lanes, s.pass, fetch, out);
    if (first) tile_values(a, g, most, fetch, s.values);
    tile_output(a, s.values, 0, t[i].most, nullptr, lanes, lanes == all, s.pass, fetch, out.out);
    first = false;
  }
  while (fetch.left) fetch.lines(16);
  uint32_t apart[kCluster];  // rows of each block
  int64_t whole = kGroups;   // groups that all of them see
  bool any = false;
  for (int64_t i = 0; i < piece.count; i++) {
    const Block& b = piece.blocks[i];
    apart[i] = 0;
    for (int64_t r = 0; r < b.rows; r++) {
      const int64_t past = a.prefix_len[b.row + r] - p0;
      if (keys_of(a, b.row + r, p0) <= 0 || (shared && t[i].lanes & row_mask(b, r))) continue;
      apart[i] |= 1u << r;
      whole = lesser(whole, past > 0 ? past / 16 : 0);
      any = true;
    }
  }
  if (!any) return;
  prefix_groups(a, seq, piece.kv_head, p0, whole * 16, g);
  tile_values(a, g, whole * 16 / kChunk * kChunk, fetch, s.values);
  for (int64_t i = 0; i < piece.count; i++)
    if (apart[i])
      apart_pass(a, piece.blocks[i], apart[i], piece.kv_head, p0, g, queries + i * query_words(a), s,
                 partial_at(partials + i * partial_floats(a.dim)));
}

// as merge_factors, with maxima in units of log 2; a lane that this split adds nothing to is left as it is
static void attention_merge_tiles(const AttentionArgs& a, const Block& b, float* state, const Partial& p, bool first) {
  if (!tile_attention(a)) return attention_merge_generic(a, b, state, p, first);
  const F none = splat(-INFINITY), top = first ? none : load(state), other = load(p.max), most = vmax(top, other);
  const I empty = (I)(bits(top) == bits(none)), nothing = (I)(bits(other) == bits(none));
  const F keep = (F)((I)exp2_16(top - most) & ~empty), add = (F)((I)exp2_16(other - most) & ~nothing);
  const F sum = first ? F{} : load(state + 16);
  store(state, most);
  store(state + 16, fma(sum, keep, load(p.sum) * add));
  for (int64_t lane = 0; lane < b.rows * b.heads; lane++) {
    if (nothing[lane] && !first) continue;
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
                                attention_begin_tiles,
                                attention_split_tiles,
                                attention_merge_tiles,
                                attention_store_tiles,
                                noise,
                                sampler};
  return &table;
}
}  // namespace spec
