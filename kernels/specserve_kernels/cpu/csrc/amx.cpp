// The kernels for x86-64 with AMX tiles: bf16 GEMMs here, everything else as in avx512.cpp.
// One output is one tile element: TDPBF16PS adds 32 products to it in a fixed way, tile after tile in order of k, so
// its bits depend on neither the other rows of the tile nor how many tiles of rows there are.
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

struct RowTile {
  const bf16* x;
  int64_t stride;  // bytes
  int64_t rows;    // of the tile's 16 that exist
};

static inline void put_tile(const Gemm& g, const float* acc, int64_t row, int64_t rows, int64_t n0) {
  for (int64_t r = 0; r < rows; r++) put_panel(g, row + r, n0, load(acc + r * 16), load(acc + 256 + r * 16));
}

// one panel of 32 outputs times one or two tiles of 16 rows
template <bool two>
static inline void tiles(const Gemm& g, const bf16* p, int64_t kt, const RowTile* x, int64_t row, int64_t n0) {
  alignas(64) float acc[4 * 256];
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const bf16 *a = x[0].x, *b = two ? x[1].x : nullptr;
  const int64_t lda = x[0].stride, ldb = two ? x[1].stride : 0;
  for (int64_t k = 0; k < kt; k++) {
    _tile_loadd(6, p + k * 1024, 64);
    _tile_loadd(7, p + k * 1024 + 512, 64);
    _tile_loadd(4, a + k * 32, lda);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, b + k * 32, ldb);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, 64);
  _tile_stored(1, acc + 256, 64);
  put_tile(g, acc, row, x[0].rows, n0);
  if (two) {
    _tile_stored(2, acc + 512, 64);
    _tile_stored(3, acc + 768, 64);
    put_tile(g, acc + 512, row + 16, x[1].rows, n0);
  }
}

// Whole tiles are read where they are; a ragged last one, or rows that are no multiple of 32 long, from a zero-padded
// copy that each thread makes for itself.
static void gemm_tiles(const Gemm& g, int tid, int nth) {
  if (g.type != kBf16) return gemm_generic(g, tid, nth);
  const int64_t panels = up(g.n, kPanel) / kPanel;
  const int64_t first = share(panels, tid, nth), last = share(panels, tid + 1, nth);
  if (first == last || !g.m) return;
  const int64_t kp = up(g.k, 32), kt = kp / 32;
  const int64_t from = kp != g.k ? 0 : g.m / 16 * 16;  // rows from here on are copied
  const int64_t padded = up(g.m, 16) - from, count = up(g.m, 16) / 16;
  char* scratch = thread_scratch((size_t)count * sizeof(RowTile) + 64 + (size_t)padded * kp * 2);
  RowTile* tile = (RowTile*)scratch;
  bf16* copy = (bf16*)(scratch + up(count * sizeof(RowTile), 64));
  for (int64_t m = from; m < g.m; m++) {
    memcpy(copy + (m - from) * kp, (const bf16*)g.x + m * g.k, g.k * 2);
    memset(copy + (m - from) * kp + g.k, 0, (kp - g.k) * 2);
  }
  if (padded) memset(copy + (g.m - from) * kp, 0, (padded - (g.m - from)) * kp * 2);
  for (int64_t t = 0; t < count; t++)
    tile[t] = RowTile{t * 16 < from ? (const bf16*)g.x + t * 16 * g.k : copy + (t * 16 - from) * kp, kp * 2,
                      lesser(16, g.m - t * 16)};
  finish_stores();
  for (int64_t n = first; n < last; n++) {
    const bf16* p = (const bf16*)g.packed + n * kp * kPanel;
    int64_t t = 0;
    for (; t + 2 <= count; t += 2) tiles<true>(g, p, kt, tile + t, t * 16, n * kPanel);
    if (t < count) tiles<false>(g, p, kt, tile + t, t * 16, n * kPanel);
  }
}

}  // namespace amx

const Kernels* amx_kernels() {
  using namespace amx;
  static const Kernels table = {"amx",
                                thread_begin,
                                thread_end,
                                gemm_tiles,
                                embed,
                                rms_norm,
                                rope,
                                silu_mul,
                                attention_scratch_generic,
                                attention_split_generic,
                                attention_merge_generic,
                                attention_store_generic,
                                noise,
                                weights,
                                draw};
  return &table;
}
}  // namespace spec
