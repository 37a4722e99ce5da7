// The records that cross from the C ABI to the kernels of each instruction set. Plain data, no behaviour: the same
// struct is filled once in dispatch.cpp and read by whichever table of kernels the machine runs.
#pragma once
#include <cstddef>
#include <cstdint>

namespace spec {

enum Type : int { kBf16 = 0, kF32 = 1, kInt8 = 2 };  // kInt8: of weights only

// y[m, n] = x[m, k] * w[n, k]^T, or y += the same when `accumulate` (both roundings kept: product first, then sum).
struct Gemm {
  const void* x;
  const void* packed;
  void* y;
  int64_t m, n, k;
  int type;      // of x and the weight
  int out_type;  // of y
  int accumulate;
  const float* x_scale = nullptr;  // int8 only: one a row; x is then what `quantize` wrote
  int64_t y_stride = 0;            // elements from a row of y to the next; 0: n
};

struct AttentionArgs {
  const void* q;        // [rows, heads, dim], consecutive rows q_stride elements apart
  const void* k_cache;  // [pages, kv_heads, page_size, dim]
  const void* v_cache;
  void* out;  // [rows, heads, dim]
  const int32_t *sequence, *prefix_len, *tail_slots, *tail_len, *page_table;
  int64_t rows, heads, kv_heads, dim, page_size, depth, table_stride, q_stride;
  float scale;
  int type;
};

// Up to 16 lanes that share one kv head: `rows` rows of one sequence times `heads` query heads of its group.
struct Block {
  int64_t row, rows, head, heads;  // head counts from the start of the group
  int64_t keys;                    // positions that the farthest row sees
};

// What is computed at once: one split of positions, for one kv head and all blocks of a cluster, which are of one
// sequence, so that its K and V are fetched and prepared once for all of them.
struct Piece {
  const Block* blocks;
  int64_t count, kv_head, split;
};

// What one split of positions gives for one block: 16 lanes of maximum, sum and unnormalised output, side by side.
struct Partial {
  float* max;
  float* sum;
  float* out;
};
inline int64_t partial_floats(int64_t dim) { return 32 + 16 * dim; }
inline Partial partial_at(float* p) { return Partial{p, p + 16, p + 32}; }

struct LayerArgs {
  const void *attention_norm, *qkv, *output, *mlp_norm, *gate_up, *down;  // matrices packed
};

struct DecoderArgs {
  const LayerArgs* layers;
  const void *embed, *norm;  // [vocab, hidden], [hidden]
  const float* embed_scale;  // [vocab] where embed and all matrices are int8, else null
  const float* rope;         // [positions, dim]
  const int64_t *ids, *positions, *slots;
  void *kv, *out;                  // [layers, 2, pages, kv_heads, page_size, dim], [rows, hidden]
  const int64_t* feature_layers;   // ascending; the hidden state after each goes to
  void* features;                  // [feature layers, rows, hidden]
  int64_t num_layers, num_features, hidden, inner, vocab, rope_rows, pages, sequences;
  float eps;
};

// What noise is a function of, besides the token id.
struct NoiseKey {
  int64_t seed, draw, choice, purpose;
};

// A place in the stable order of a row (logit descending, id ascending): just before this logit with this id.
struct Cut {
  float logit;
  int64_t id;
};

// The passes of a draw over one row of logits (sample_vec.h).
struct Sampler {
  float (*peak)(const float* logits, int64_t n, int64_t fold, float* groups);
  int64_t (*collect)(const float* logits, int64_t n, float bound, int64_t limit, int32_t* ids);
  void (*weights)(const float* logits, int64_t n, float temperature, float top, double* weight);
  void (*mass)(const float* logits, int64_t n, float temperature, float top, const Cut cut[2], double sum[2]);
  double (*rough_mass)(const float* logits, int64_t n, float temperature, float top, const Cut cut[2], double sum[2]);
  int64_t (*draw)(const float* logits, int64_t n, float temperature, float top, int64_t best_id, const Cut& cut,
                  double min_p, const NoiseKey& key);
  int64_t (*draw_list)(const int32_t* ids, const float* logits, int64_t n, float temperature, const NoiseKey& key);
};

struct Kernels {
  const char* name;
  void (*thread_begin)();
  void (*thread_end)();
  void (*gemm)(const Gemm&, int tid, int nth);
  void (*gemm_int8)(const Gemm&, int tid, int nth);
  // rows [rows, k] -> digits and scales (int8.h); a thread takes the same rows as in rms_norm
  void (*quantize)(const void* x, int8_t* digits, float* scale, int64_t rows, int64_t k, int type, int tid, int nth);
  void (*embed_int8)(const int64_t* ids, const int8_t* table, const float* scale, void* y, int64_t rows, int64_t dim,
                     int type, int tid, int nth);
  void (*embed)(const int64_t* ids, const void* table, void* y, int64_t rows, int64_t dim, int type, int tid, int nth);
  void (*rms_norm)(const void* x, const void* w, void* y, int64_t rows, int64_t dim, float eps, int type, int tid,
                   int nth);
  // x rows are x_stride elements apart, y rows y_stride apart
  void (*rope)(const void* x, const int64_t* positions, const float* table, void* y, int64_t rows, int64_t heads,
               int64_t dim, int64_t x_stride, int64_t y_stride, int type, int tid, int nth);
  // columns [from, to) of all rows
  void (*silu_mul)(const void* x, void* y, int64_t rows, int64_t inner, int64_t from, int64_t to, int type);
  size_t (*attention_scratch)(const AttentionArgs&);
  // before the first piece of a cluster that a thread computes
  void (*attention_begin)(const AttentionArgs&, const Block* blocks, int64_t count, char* scratch);
  // one Partial after the other, for those blocks that see the split; `next` (or null) is only prefetched
  void (*attention_split)(const AttentionArgs&, const Piece&, const Piece* next, char* scratch, float* partials);
  void (*attention_merge)(const AttentionArgs&, const Block&, float* state, const Partial&, bool first);
  void (*attention_store)(const AttentionArgs&, const Block&, int64_t kv_head, const float* state);
  void (*noise)(int64_t seed, int64_t draw, int64_t choice, int64_t purpose, int64_t vocab, float* out);
  Sampler sampler;
};

constexpr int64_t kSplit = 128;  // S: positions of one split of attention
constexpr int64_t kCluster = 8;  // blocks of one sequence that share a piece, at most
constexpr int64_t kPanel = 32;   // outputs of one panel of a packed weight
constexpr int64_t kInt8Header = 256;
inline int64_t int8_panel_bytes(int64_t k) { return kInt8Header + (k + 63) / 64 * 64 * kPanel; }

void gemm_int8_vnni(const Gemm&, int tid, int nth);
const Kernels* plain_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();

}  // namespace spec
