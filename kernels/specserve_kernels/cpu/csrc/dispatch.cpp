// The C ABI: picks a table of kernels once, checks what could reach outside a buffer, spreads an operation over
// threads. A function that can refuse its input returns 0 or the number of a reason (native.py has the words).
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "args.h"
#include "sample.h"
#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace spec {

enum Reason : int { kOk = 0, kBadId = 1, kBadPosition = 2, kBadSlot = 3, kBadSequence = 4, kBadPage = 5, kBadLength = 6 };

// Threads of one parallel region wait for each other here: spinning first, giving the core away after a while, since
// a neighbour's process may hold the core of the one that is waited for.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void wait() {
    if (n_ == 1) return;
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (unsigned spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins >= 1000)
        sched_yield();
#ifdef SPEC_X86
      else
        __builtin_ia32_pause();
#endif
    }
  }

 private:
  int n_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

struct Team {
  const Kernels* kernels;
  int tid, nth;
  Barrier* barrier;
};

template <class Body>
static void parallel(const Kernels* kernels, int threads, Body body) {
  if (threads <= 1) {
    Barrier barrier(1);
    kernels->thread_begin();
    body(Team{kernels, 0, 1, &barrier});
    kernels->thread_end();
    return;
  }
  Barrier* barrier = nullptr;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    barrier = new Barrier(omp_get_num_threads());
    kernels->thread_begin();
    body(Team{kernels, omp_get_thread_num(), omp_get_num_threads(), barrier});
    kernels->thread_end();
  }
  delete barrier;
}

static size_t width(int type) { return type == kBf16 ? 2 : 4; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ----------------------------------------------------------------------------------------- attention

// A cluster is up to kCluster blocks of one sequence; its pieces lie side by side, splits in order and kv heads within,
// so that a page is read once, by one thread, with all its heads. Threads take equal shares of all pieces by their cost.
// That is scheduling: the same functions give the same partials to the same merges in the same order.
struct Cluster {
  const Block* blocks;
  int64_t count, first, last;  // pieces [first, last)
  int64_t folded;              // so many are merged as they come, by the thread that has the first
  int64_t shared;              // where states and the other partials are in `shared`; -1: one thread has all pieces
};

struct AttentionPlan {
  std::vector<Block> blocks;
  std::vector<Piece> pieces;
  std::vector<Cluster> clusters;
  std::vector<int64_t> begin;  // thread t has pieces [begin[t], begin[t + 1])
  std::vector<float> shared;
  int64_t partial = 0;  // floats
  size_t local = 0, scratch = 0;  // floats of states and partials of a cluster of one's own, bytes
  bool cut = false;
};

// In 16 keys of one block or thereabouts; rows whose tail is in the split go over it apart, and over its end one by one.
static int64_t piece_cost(const AttentionArgs& a, const Piece& piece) {
  const int64_t p0 = piece.split * kSplit;
  int64_t cost = 8;
  for (int64_t i = 0; i < piece.count; i++) {
    const Block& b = piece.blocks[i];
    const int64_t groups = ceil_div(std::min(kSplit, std::max<int64_t>(b.keys - p0, 0)), 16) + 2;
    int64_t apart = 0;
    for (int64_t r = b.row; r < b.row + b.rows; r++)
      apart += a.tail_len[r] && a.prefix_len[r] < p0 + kSplit && a.prefix_len[r] + a.tail_len[r] > p0;
    cost += groups + (apart ? groups + 4 * apart : 0);
  }
  return cost;
}

static void plan_blocks(AttentionPlan& plan, const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads, rows = group >= 16 ? 1 : 16 / group;
  for (int64_t r = 0; r < a.rows;) {
    int64_t n = 1, keys = a.prefix_len[r] + a.tail_len[r];
    while (n < rows && r + n < a.rows && a.sequence[r + n] == a.sequence[r]) {
      const int64_t k = a.prefix_len[r + n] + a.tail_len[r + n];
      keys = k > keys ? k : keys;
      n++;
    }
    for (int64_t h = 0; h < group; h += 16)
      plan.blocks.push_back(Block{r, n, h, group - h < 16 ? group - h : 16, keys});
    r += n;
  }
}

static AttentionPlan plan_attention(const Kernels* kernels, const AttentionArgs& a, int threads) {
  AttentionPlan plan;
  plan_blocks(plan, a);
  const int64_t most = std::max<int64_t>(1, std::min(kCluster, 32 / a.kv_heads));  // states stay in L2
  std::vector<int64_t> before{0};  // the cost of all pieces before each
  for (size_t i = 0; i < plan.blocks.size();) {
    const Block* blocks = &plan.blocks[i];
    int64_t count = 0, keys = 0;
    for (; i < plan.blocks.size() && count < most && a.sequence[plan.blocks[i].row] == a.sequence[blocks->row]; i++) {
      keys = std::max(keys, plan.blocks[i].keys);
      count++;
    }
    const int64_t first = plan.pieces.size();
    for (int64_t s = 0; s * kSplit < keys; s++)
      for (int64_t h = 0; h < a.kv_heads; h++) {
        plan.pieces.push_back(Piece{blocks, count, h, s});
        before.push_back(before.back() + piece_cost(a, plan.pieces.back()));
      }
    plan.clusters.push_back(Cluster{blocks, count, first, (int64_t)plan.pieces.size(), 0, -1});
  }
  for (int t = 0; t <= threads; t++)
    plan.begin.push_back(std::lower_bound(before.begin(), before.end(), before.back() * t / threads) - before.begin());
  plan.partial = partial_floats(a.dim);
  int64_t shared = 0;
  for (Cluster& c : plan.clusters) {
    const int64_t end = *std::upper_bound(plan.begin.begin(), plan.begin.end() - 1, c.first);
    if (end >= c.last) continue;
    c.folded = end - c.first;
    c.shared = shared;
    shared += (a.kv_heads + c.last - end) * c.count * plan.partial;
    plan.cut = true;
  }
  plan.shared.resize(shared + 16);
  plan.local = (size_t)(plan.partial * most * (a.kv_heads + 1));
  plan.scratch = kernels->attention_scratch(a);
  return plan;
}

static float* aligned(std::vector<float>& v) { return (float*)(((uintptr_t)v.data() + 63) & ~(uintptr_t)63); }

// one partial of each block into its state
static void merge_piece(const AttentionArgs& a, const AttentionPlan& plan, const Kernels* k, const Piece& piece,
                        float* partials, float* states) {
  for (int64_t i = 0; i < piece.count; i++)
    if (piece.split * kSplit < piece.blocks[i].keys)
      k->attention_merge(a, piece.blocks[i], states + (piece.kv_head * piece.count + i) * plan.partial,
                         partial_at(partials + i * plan.partial), piece.split == 0);
}

static void attend_pieces(const AttentionArgs& a, AttentionPlan& plan, const Kernels* k, int64_t from, int64_t to,
                          float* local, char* scratch) {
  float* shared = aligned(plan.shared);
  size_t c = 0;
  while (c < plan.clusters.size() && plan.clusters[c].last <= from) c++;
  for (; c < plan.clusters.size() && plan.clusters[c].first < to; c++) {
    const Cluster& cluster = plan.clusters[c];
    const int64_t size = cluster.count * plan.partial;
    float* states = cluster.shared < 0 ? local : shared + cluster.shared;
    float* own = local + size * a.kv_heads;
    k->attention_begin(a, cluster.blocks, cluster.count, scratch);
    for (int64_t p = std::max(from, cluster.first); p < std::min(to, cluster.last); p++) {
      const int64_t apart = p - cluster.first - cluster.folded;
      const bool merged = cluster.shared < 0 || apart < 0;
      float* partials = merged ? own : states + (a.kv_heads + apart) * size;
      k->attention_split(a, plan.pieces[p], p + 1 < to ? &plan.pieces[p + 1] : nullptr, scratch, partials);
      if (merged) merge_piece(a, plan, k, plan.pieces[p], partials, states);
    }
    if (cluster.shared >= 0) continue;
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t i = 0; i < cluster.count; i++)
        k->attention_store(a, cluster.blocks[i], h, states + h * size + i * plan.partial);
  }
}

// what several threads computed of one cluster
static void finish_cut_clusters(const AttentionArgs& a, AttentionPlan& plan, Team team) {
  int64_t unit = 0;
  for (const Cluster& c : plan.clusters) {
    if (c.shared < 0) continue;
    float* states = aligned(plan.shared) + c.shared;
    const int64_t size = c.count * plan.partial;
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t i = 0; i < c.count; i++) {
        if (unit++ % team.nth != team.tid) continue;
        float* state = states + h * size + i * plan.partial;
        const Block& b = c.blocks[i];
        for (int64_t p = c.first + h; p < c.last; p += a.kv_heads) {
          const int64_t apart = p - c.first - c.folded, split = plan.pieces[p].split;
          if (apart < 0 || split * kSplit >= b.keys) continue;
          float* partial = states + (a.kv_heads + apart) * size + i * plan.partial;
          team.kernels->attention_merge(a, b, state, partial_at(partial), split == 0);
        }
        team.kernels->attention_store(a, b, h, state);
      }
  }
}

static char* attention_memory(size_t bytes) {
  static thread_local char* buffer = nullptr;
  static thread_local size_t size = 0;
  if (bytes > size) {
    free(buffer);
    size = (bytes + 4095) / 4096 * 4096;
    buffer = (char*)aligned_alloc(4096, size);
    if (!buffer) abort();
  }
  return buffer;
}

static void run_attention(const AttentionArgs& a, AttentionPlan& plan, Team team) {
  char* memory = attention_memory(plan.local * 4 + plan.scratch);
  for (size_t t = team.tid; t + 1 < plan.begin.size(); t += team.nth)
    attend_pieces(a, plan, team.kernels, plan.begin[t], plan.begin[t + 1], (float*)memory, memory + plan.local * 4);
  if (!plan.cut) return;
  team.barrier->wait();
  finish_cut_clusters(a, plan, team);
}

static int check_attention(const AttentionArgs& a, int64_t sequences, int64_t pages) {
  for (int64_t r = 0; r < a.rows; r++) {
    const int64_t prefix = a.prefix_len[r], tail = a.tail_len[r], seq = a.sequence[r];
    if (seq < 0 || seq >= sequences) return kBadSequence;
    if (prefix < 0 || tail < 0 || tail > a.depth || prefix + tail < 1) return kBadLength;
    if (ceil_div(prefix, a.page_size) > a.table_stride) return kBadLength;
    const int32_t* table = a.page_table + seq * a.table_stride;
    // rows of a chunk share their pages: the next row's check covers this one's when it sees at least as much
    const bool covered = r + 1 < a.rows && a.sequence[r + 1] == seq && a.prefix_len[r + 1] >= prefix;
    for (int64_t p = 0; !covered && p * a.page_size < prefix; p++)
      if (table[p] < 0 || table[p] >= pages) return kBadPage;
    for (int64_t j = 0; j < tail; j++) {
      const int64_t slot = a.tail_slots[r * a.depth + j];
      if (slot < 0 || slot / a.page_size >= a.table_stride) return kBadSlot;
      const int32_t page = table[slot / a.page_size];
      if (page < 0 || page >= pages) return kBadPage;
    }
  }
  return kOk;
}

static int check_range(const int64_t* v, int64_t n, int64_t limit, Reason reason) {
  for (int64_t i = 0; i < n; i++)
    if (v[i] < 0 || v[i] >= limit) return reason;
  return kOk;
}

static void write_rows(const void* k, int64_t k_stride, void* cache, const int64_t* slots, int64_t rows,
                       int64_t kv_heads, int64_t page_size, int64_t dim, int type, Team team) {
  const size_t bytes = dim * width(type);
  for (int64_t r = rows * team.tid / team.nth; r < rows * (team.tid + 1) / team.nth; r++)
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t at = (slots[r] / page_size * kv_heads + h) * page_size + slots[r] % page_size;
      memcpy((char*)cache + at * bytes, (const char*)k + (r * k_stride + h * dim) * width(type), bytes);
    }
}

// ------------------------------------------------------------------------------------------- forward

static size_t packed_bytes(int64_t n, int64_t k, int type) {
  const int64_t panels = ceil_div(n, kPanel);
  if (type == kInt8) return panels * int8_panel_bytes(k);
  return panels * kPanel * (type == kBf16 ? ceil_div(k, 32) * 32 * 2 : k * 4);
}

// Each thread has the same columns of the two halves of a gate_up product, and brings them together.
struct Columns {
  int64_t from, to;
};
static Columns columns_of(int64_t inner, Team team) {
  const int64_t panels = ceil_div(inner, kPanel);
  return Columns{panels * team.tid / team.nth * kPanel,
                 std::min(inner, panels * (team.tid + 1) / team.nth * kPanel)};
}

// Rows brought to the int8 format, for one GEMM at a time.
struct Quantized {
  int8_t* digits;
  float* scale;
};

static size_t digit_bytes(int64_t rows, int64_t k) { return (size_t)ceil_div(rows, 8) * 16 * ceil_div(k, 64) * 64; }
static size_t quantized_bytes(int64_t rows, int64_t k) { return (digit_bytes(rows, k) + rows * 4 + 63) / 64 * 64; }
static Quantized quantized_at(char* p, int64_t rows, int64_t k) {
  return Quantized{(int8_t*)p, (float*)(p + digit_bytes(rows, k))};
}

// `count` of them, quantized_bytes apart; the caller's thread keeps the memory
static char* quantized_memory(int64_t rows, int64_t k, int count) {
  static thread_local std::vector<char> memory;
  const size_t bytes = quantized_bytes(rows, k) * count + 64;
  if (memory.size() < bytes) memory.resize(bytes);
  return (char*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

// Few rows are normed and quantized by every thread for itself: that takes no longer than waiting for one another does,
// and far less where a neighbour's process holds a core.
constexpr int64_t kOwnRows = 8;

// Activations of one forward; whole 16-row tiles are read in place by the GEMMs.
struct Activations {
  char *x, *normed, *qkv, *attended, *gate_up, *inner;
  char* quantized;
  bool own;  // `normed` and `quantized` once a thread
  int64_t widest;

  char* normed_of(const DecoderArgs& d, const AttentionArgs& a, Team team) const {
    return own ? normed + team.tid * normed_bytes(d, a) : normed;
  }
  Quantized quantized_of(const AttentionArgs& a, Team team) const {
    return quantized_at(quantized + (own ? team.tid * quantized_bytes(a.rows, widest) : 0), a.rows, widest);
  }
  static size_t normed_bytes(const DecoderArgs& d, const AttentionArgs& a) {
    return (a.rows * d.hidden * width(a.type) + 63) / 64 * 64;
  }
};

static Activations activations(const DecoderArgs& d, const AttentionArgs& a, int threads) {
  static thread_local std::vector<char> memory;
  const bool own = a.rows <= kOwnRows;
  const size_t w = width(a.type), rows = a.rows;
  const size_t sizes[] = {rows * d.hidden * w, Activations::normed_bytes(d, a) * (own ? threads : 1),
                          rows * a.q_stride * w, rows * a.heads * a.dim * w, rows * 2 * d.inner * w,
                          rows * d.inner * w};
  size_t total = 64;
  for (size_t s : sizes) total += (s + 63) / 64 * 64;
  if (memory.size() < total) memory.resize(total);
  char* p = (char*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
  char* part[6];
  for (int i = 0; i < 6; i++) {
    part[i] = p;
    p += (sizes[i] + 63) / 64 * 64;
  }
  const int64_t widest = std::max({d.hidden, d.inner, a.heads * a.dim});
  char* quantized = d.embed_scale ? quantized_memory(rows, widest, own ? threads : 1) : nullptr;
  return Activations{part[0], part[1], part[2], part[3], part[4], part[5], quantized, own, widest};
}

// One layer: the operations that native.py offers one by one, in the same order with the same roundings, so the bits
// are the same. Each phase shares rows or outputs out; a barrier stands where the next one reads across shares. In int8
// the input of a GEMM is quantized first.
static void layer_forward(const DecoderArgs& d, const LayerArgs& w, AttentionArgs a, AttentionPlan& plan,
                          const Activations& m, Team team) {
  const Kernels* k = team.kernels;
  const int64_t rows = a.rows, q_size = a.heads * a.dim, kv_size = a.kv_heads * a.dim;
  const bool int8 = d.embed_scale != nullptr;
  const int tid = m.own ? 0 : team.tid, nth = m.own ? 1 : team.nth;  // for work on whole rows
  char* normed = m.normed_of(d, a, team);
  const Quantized q = int8 ? m.quantized_of(a, team) : Quantized{};
  const auto quantize = [&](const void* x, int64_t in) {
    if (!int8) return;
    k->quantize(x, q.digits, q.scale, rows, in, a.type, tid, nth);
    if (!m.own) team.barrier->wait();
  };
  const auto norm = [&](const void* weight) {
    k->rms_norm(m.x, weight, normed, rows, d.hidden, d.eps, a.type, tid, nth);
    if (!m.own && !int8) team.barrier->wait();
    quantize(normed, d.hidden);  // of the rows that this thread has just made
  };
  const auto gemm = [&](const void* x, const void* packed, void* y, int64_t out, int64_t in, int accumulate,
                        int64_t y_stride) {
    if (int8)
      k->gemm_int8(Gemm{q.digits, packed, y, rows, out, in, kInt8, a.type, accumulate, q.scale, y_stride}, team.tid,
                   team.nth);
    else
      k->gemm(Gemm{x, packed, y, rows, out, in, a.type, a.type, accumulate, nullptr, y_stride}, team.tid, team.nth);
  };
  norm(w.attention_norm);
  gemm(normed, w.qkv, m.qkv, a.q_stride, d.hidden, 0, 0);
  team.barrier->wait();
  k->rope(m.qkv, d.positions, d.rope, m.qkv, rows, a.heads + a.kv_heads, a.dim, a.q_stride, a.q_stride, a.type,
          team.tid, team.nth);
  const char* key = m.qkv + q_size * width(a.type);
  write_rows(key, a.q_stride, (void*)a.k_cache, d.slots, rows, a.kv_heads, a.page_size, a.dim, a.type, team);
  write_rows(key + kv_size * width(a.type), a.q_stride, (void*)a.v_cache, d.slots, rows, a.kv_heads, a.page_size,
             a.dim, a.type, team);
  team.barrier->wait();
  run_attention(a, plan, team);
  team.barrier->wait();
  quantize(m.attended, q_size);
  gemm(m.attended, w.output, m.x, d.hidden, q_size, 1, 0);
  team.barrier->wait();
  norm(w.mlp_norm);
  if (d.inner % kPanel) {
    gemm(normed, w.gate_up, m.gate_up, 2 * d.inner, d.hidden, 0, 0);
    team.barrier->wait();
  } else {
    const char* up = (const char*)w.gate_up + packed_bytes(d.inner, d.hidden, int8 ? (int)kInt8 : a.type);
    gemm(normed, w.gate_up, m.gate_up, d.inner, d.hidden, 0, 2 * d.inner);
    gemm(normed, up, m.gate_up + d.inner * width(a.type), d.inner, d.hidden, 0, 2 * d.inner);
  }
  const Columns mine = columns_of(d.inner, team);
  k->silu_mul(m.gate_up, m.inner, rows, d.inner, mine.from, mine.to, a.type);
  team.barrier->wait();
  quantize(m.inner, d.inner);
  gemm(m.inner, w.down, m.x, d.hidden, d.inner, 1, 0);
  team.barrier->wait();
}

static void decoder_forward(const DecoderArgs& d, AttentionArgs a, AttentionPlan& plan, const Activations& m,
                            Team team) {
  const size_t cache = (size_t)d.pages * a.kv_heads * a.page_size * a.dim * width(a.type);
  const size_t bytes = (size_t)a.rows * d.hidden * width(a.type);
  if (d.embed_scale)
    team.kernels->embed_int8(d.ids, (const int8_t*)d.embed, d.embed_scale, m.x, a.rows, d.hidden, a.type, team.tid,
                             team.nth);
  else
    team.kernels->embed(d.ids, d.embed, m.x, a.rows, d.hidden, a.type, team.tid, team.nth);
  if (m.own) team.barrier->wait();  // else the first norm is of the rows that this thread has just made
  a.q = m.qkv;
  a.out = m.attended;
  int64_t feature = 0;
  for (int64_t l = 0; l < d.num_layers; l++) {
    a.k_cache = (char*)d.kv + 2 * l * cache;
    a.v_cache = (char*)d.kv + (2 * l + 1) * cache;
    layer_forward(d, d.layers[l], a, plan, m, team);
    for (; feature < d.num_features && d.feature_layers[feature] == l; feature++)
      if (team.tid == 0) memcpy((char*)d.features + feature * bytes, m.x, bytes);
  }
  team.kernels->rms_norm(m.x, d.norm, d.out, a.rows, d.hidden, d.eps, a.type, team.tid, team.nth);
}

}  // namespace spec

using namespace spec;

// Most blocks hold nothing above the worst of the best so far, which one pass of comparisons shows.
static void top_of_row(const float* row, int64_t vocab, int64_t count, int64_t* ids) {
  constexpr int64_t BLOCK = 64;
  std::vector<float> best(count, -INFINITY);
  for (int64_t k = 0; k < count; ++k) ids[k] = k;
  int64_t found = 0;
  for (int64_t first = 0; first < vocab; first += BLOCK) {
    const int64_t end = first + BLOCK < vocab ? first + BLOCK : vocab;
    if (found == count) {
      const float worst = best[count - 1];
      int above = 0;
      for (int64_t j = first; j < end; ++j) above |= row[j] > worst;
      if (!above) continue;
    }
    for (int64_t j = first; j < end; ++j) {
      if (!(row[j] >= -INFINITY) || (found == count && !(row[j] > best[count - 1]))) continue;
      int64_t k = found < count ? found++ : count - 1;
      for (; k > 0 && row[j] > best[k - 1]; --k) best[k] = best[k - 1], ids[k] = ids[k - 1];
      best[k] = row[j], ids[k] = j;
    }
  }
}

#pragma GCC visibility push(default)
extern "C" {

// The best table of kernels up to `limit` (plain, avx512, amx); its name. Asks the kernel for the tile registers.
const Kernels* spec_select(const char* limit) {
  const Kernels* kernels = plain_kernels();
#ifdef SPEC_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("fma");
  if (avx512 && strcmp(limit, "plain") != 0) kernels = avx512_kernels();
  unsigned a, b, c, d;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && __builtin_cpu_supports("avx512bf16");
  // ARCH_REQ_XCOMP_PERM for XTILEDATA
  if (avx512 && tiles && strcmp(limit, "amx") == 0 && syscall(SYS_arch_prctl, 0x1023, 18) == 0)
    kernels = amx_kernels();
#else
  (void)limit;
#endif
  return kernels;
}

const char* spec_name(const Kernels* kernels) { return kernels->name; }

void spec_huge_pages(void* p, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t from = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, to = ((uintptr_t)p + bytes) & ~(uintptr_t)4095;
  if (to > from) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

int64_t spec_packed_bytes(int64_t n, int64_t k, int type) {
  return packed_bytes(n, k, type);
}

// w [n, k] -> panels of 32 outputs; what pads them is zero
void spec_pack(const void* w, void* packed, int64_t n, int64_t k, int type, int threads) {
  const int64_t panels = ceil_div(n, kPanel), kp = type == kBf16 ? ceil_div(k, 32) * 32 : k;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panels; p++) {
    if (type == kBf16) {
      uint16_t* out = (uint16_t*)packed + p * kp * kPanel;
      for (int64_t i = 0; i < kp * kPanel; i++) {
        const int64_t in_tile = i % 512, half = i / 512 % 2;
        const int64_t row = p * kPanel + half * 16 + in_tile / 2 % 16, col = i / 1024 * 32 + in_tile / 32 * 2 + i % 2;
        out[i] = row < n && col < k ? ((const uint16_t*)w)[row * k + col] : 0;
      }
    } else {
      float* out = (float*)packed + p * kp * kPanel;
      for (int64_t i = 0; i < kp * kPanel; i++) {
        const int64_t row = p * kPanel + i % kPanel;
        out[i] = row < n ? ((const float*)w)[row * k + i / kPanel] : 0.0f;
      }
    }
  }
}

// w [n, k] int8 with one scale an output -> panels as int8.h reads them
void spec_pack_int8(const int8_t* w, const float* scale, char* packed, int64_t n, int64_t k, int threads) {
  const int64_t panels = ceil_div(n, kPanel), stride = int8_panel_bytes(k);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panels; p++) {
    char* panel = packed + p * stride;
    memset(panel, 0, stride);
    for (int64_t j = 0; j < kPanel && p * kPanel + j < n; j++) {
      const int8_t* row = w + (p * kPanel + j) * k;
      int32_t sum = 0;
      for (int64_t i = 0; i < k; i++) {
        sum += row[i];
        panel[kInt8Header + i / 64 * 2048 + j / 16 * 1024 + i % 64 / 4 * 64 + j % 16 * 4 + i % 4] = row[i];
      }
      ((float*)panel)[j] = scale[p * kPanel + j];
      ((int32_t*)panel)[kPanel + j] = -128 * sum;
    }
  }
}

void spec_linear(const Kernels* kernels, const void* x, const void* packed, void* y, int64_t m, int64_t n, int64_t k, int type, int out_type,
                 int threads) {
  const Gemm g{x, packed, y, m, n, k, type, out_type, 0};
  parallel(kernels, threads, [&](Team t) { kernels->gemm(g, t.tid, t.nth); });
}

// x of `type`; the weight int8
void spec_linear_int8(const Kernels* kernels, const void* x, const void* packed, void* y, int64_t m, int64_t n,
                      int64_t k, int type, int out_type, int threads) {
  const Quantized q = quantized_at(quantized_memory(m, k, 1), m, k);
  const Gemm g{q.digits, packed, y, m, n, k, kInt8, out_type, 0, q.scale};
  parallel(kernels, threads, [&](Team t) {
    kernels->quantize(x, q.digits, q.scale, m, k, type, t.tid, t.nth);
    t.barrier->wait();
    kernels->gemm_int8(g, t.tid, t.nth);
  });
}

// digits and scales as a GEMM would see them, for tests: digits [rows / 8, high and low, 8, k up to 64]
void spec_quantize(const Kernels* kernels, const void* x, int8_t* digits, float* scale, int64_t rows, int64_t k,
                   int type) {
  kernels->quantize(x, digits, scale, rows, k, type, 0, 1);
}

int spec_embed_int8(const Kernels* kernels, const int64_t* ids, const int8_t* table, const float* scale, void* y,
                    int64_t rows, int64_t vocab, int64_t dim, int type) {
  const int bad = check_range(ids, rows, vocab, kBadId);
  if (!bad) kernels->embed_int8(ids, table, scale, y, rows, dim, type, 0, 1);
  return bad;
}

int spec_embed(const Kernels* kernels, const int64_t* ids, const void* table, void* y, int64_t rows, int64_t vocab, int64_t dim, int type) {
  const int bad = check_range(ids, rows, vocab, kBadId);
  if (!bad) kernels->embed(ids, table, y, rows, dim, type, 0, 1);
  return bad;
}

void spec_rms_norm(const Kernels* kernels, const void* x, const void* w, void* y, int64_t rows, int64_t dim, float eps, int type, int threads) {
  parallel(kernels, rows * dim < 32768 ? 1 : threads,
           [&](Team t) { kernels->rms_norm(x, w, y, rows, dim, eps, type, t.tid, t.nth); });
}

int spec_rope(const Kernels* kernels, const void* x, const int64_t* positions, const float* table, void* y, int64_t rows, int64_t heads,
              int64_t dim, int64_t table_rows, int type, int threads) {
  const int bad = check_range(positions, rows, table_rows, kBadPosition);
  if (bad) return bad;
  parallel(kernels, rows * heads * dim < 32768 ? 1 : threads, [&](Team t) {
    kernels->rope(x, positions, table, y, rows, heads, dim, heads * dim, heads * dim, type, t.tid, t.nth);
  });
  return kOk;
}

void spec_silu_mul(const Kernels* kernels, const void* x, void* y, int64_t rows, int64_t inner, int type, int threads) {
  parallel(kernels, rows * inner < 8192 ? 1 : threads,
           [&](Team t) {
             const Columns mine = columns_of(inner, t);
             kernels->silu_mul(x, y, rows, inner, mine.from, mine.to, type);
           });
}

int spec_write_kv(const Kernels* kernels, const void* k, const void* v, void* k_cache, void* v_cache, const int64_t* slots, int64_t rows,
                  int64_t pages, int64_t kv_heads, int64_t page_size, int64_t dim, int type) {
  const int bad = check_range(slots, rows, pages * page_size, kBadSlot);
  if (bad) return bad;
  Barrier barrier(1);
  write_rows(k, kv_heads * dim, k_cache, slots, rows, kv_heads, page_size, dim, type, Team{kernels, 0, 1, &barrier});
  write_rows(v, kv_heads * dim, v_cache, slots, rows, kv_heads, page_size, dim, type, Team{kernels, 0, 1, &barrier});
  return kOk;
}

// planes = layers * 2; all sources of a plane are read before its first target is written
int spec_move_kv(void* kv, const int64_t* source, const int64_t* target, int64_t n, int64_t planes, int64_t pages,
                 int64_t kv_heads, int64_t page_size, int64_t dim, int type) {
  int bad = check_range(source, n, pages * page_size, kBadSlot);
  if (!bad) bad = check_range(target, n, pages * page_size, kBadSlot);
  if (bad) return bad;
  const size_t bytes = dim * width(type), plane = (size_t)pages * kv_heads * page_size * bytes;
  std::vector<char> held(n * kv_heads * bytes);
  const auto at = [&](int64_t slot, int64_t h) {
    return ((slot / page_size * kv_heads + h) * page_size + slot % page_size) * bytes;
  };
  for (int64_t p = 0; p < planes; p++) {
    char* base = (char*)kv + p * plane;
    for (int64_t i = 0; i < n; i++)
      for (int64_t h = 0; h < kv_heads; h++)
        memcpy(held.data() + (i * kv_heads + h) * bytes, base + at(source[i], h), bytes);
    for (int64_t i = 0; i < n; i++)
      for (int64_t h = 0; h < kv_heads; h++)
        memcpy(base + at(target[i], h), held.data() + (i * kv_heads + h) * bytes, bytes);
  }
  return kOk;
}

int spec_attention(const Kernels* kernels, const AttentionArgs* a, int64_t sequences, int64_t pages, int threads) {
  const int bad = check_attention(*a, sequences, pages);
  if (bad || !a->rows) return bad;
  AttentionPlan plan = plan_attention(kernels, *a, threads);
  parallel(kernels, threads, [&](Team t) { run_attention(*a, plan, t); });
  return kOk;
}

// `a` holds what is the same in all layers; q_stride is the width of a qkv row
int spec_decoder_forward(const Kernels* kernels, const DecoderArgs* d, const AttentionArgs* a, int threads) {
  int bad = check_attention(*a, d->sequences, d->pages);
  if (!bad) bad = check_range(d->ids, a->rows, d->vocab, kBadId);
  if (!bad) bad = check_range(d->positions, a->rows, d->rope_rows, kBadPosition);
  if (!bad) bad = check_range(d->slots, a->rows, d->pages * a->page_size, kBadSlot);
  if (bad || !a->rows) return bad;
  AttentionPlan plan = plan_attention(kernels, *a, threads);
  const Activations m = activations(*d, *a, threads);
  parallel(kernels, threads, [&](Team t) { decoder_forward(*d, *a, plan, m, t); });
  return kOk;
}

void spec_noise(const Kernels* kernels, const int64_t* seed, const int64_t* index, const int64_t* choice, int64_t purpose, int64_t n,
                int64_t vocab, float* out, int threads) {
  parallel(kernels, n < threads ? (int)n : threads, [&](Team t) {
    for (int64_t i = t.tid; i < n; i += t.nth)
      kernels->noise(seed[i], index[i], choice[i], purpose, vocab, out + i * vocab);
  });
}

// top_k <= 0, top_p >= 1, min_p <= 0: off
void spec_sample(const Kernels* kernels, const float* logits, const float* temperature, const int32_t* top_k,
                 const double* top_p, const double* min_p, const int64_t* seed, const int64_t* index,
                 const int64_t* choice, int64_t n, int64_t vocab, int64_t* ids, int threads) {
  std::atomic<int64_t> next{0};  // a row can take many times as long as another
  parallel(kernels, n < threads ? (int)n : threads, [&](Team) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
      ids[i] = sample_row(kernels, logits + i * vocab, vocab,
                          Sampling{temperature[i], top_p[i], min_p[i], top_k[i], seed[i], index[i], choice[i]});
  });
}

// Ids of the `count` largest logits of each row, best first, lower ids first among equals; NaN is never one of them
// unless fewer numbers are there.
void spec_top_ids(const Kernels* kernels, const float* logits, int64_t n, int64_t vocab, int64_t count, int64_t* ids,
                  int threads) {
  std::atomic<int64_t> next{0};
  parallel(kernels, n < threads ? (int)n : threads, [&](Team) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
      top_of_row(logits + i * vocab, vocab, count, ids + i * count);
  });
}

}  // extern "C"
#pragma GCC visibility pop
