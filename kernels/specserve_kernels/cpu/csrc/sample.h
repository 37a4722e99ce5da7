// Drawing one token from one row of processed logits: temperature, truncation, noise, argmax (DESIGN 2).
//
// What truncation leaves is always a prefix of the stable order. Of a small top-k the ids are listed. Otherwise the
// token is drawn from everything first: if the winner is a survivor, it is the answer, and one sum tells (the mass
// before it has not reached top-p). If it is not, neither is anything behind it: the next draw is from what comes
// before it. With top-p = p that takes 1 + log(1 / p) draws on average, and never a sort.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "args.h"

namespace spec {

struct Sampling {
  float temperature;
  double top_p, min_p;
  int32_t top_k;
  int64_t seed, index, choice;
};

constexpr int64_t kListed = 1024;  // a larger top-k is a cut, not a list

// ascending order of these is the stable order; -0 and 0 are equal
inline uint64_t order_key(float logit, int64_t id) {
  const float f = logit + 0.0f;
  uint32_t u;
  memcpy(&u, &f, 4);
  u = u >> 31 ? ~u : u | 0x80000000u;
  return (uint64_t)~u << 32 | (uint32_t)id;
}

// Leaves the `k` first of the stable order in `pool`, 0 < k < n, the last of them at its end. Every group has an id
// that is not below the k-th largest of the groups' maxima: so has the row k of them, and few more are looked at.
inline void best_k(const Sampler& s, const float* logits, int64_t n, int64_t k, std::vector<float>& groups,
                   std::vector<uint64_t>& pool) {
  static thread_local std::vector<int32_t> ids;
  ids.resize(n + 64);
  pool.clear();
  float bound = -INFINITY;
  if (k <= (int64_t)groups.size()) {
    for (size_t j = 0; j < groups.size(); j++) pool.push_back(order_key(groups[j], (int64_t)j));
    std::nth_element(pool.begin(), pool.begin() + (k - 1), pool.end());
    bound = groups[(uint32_t)pool[k - 1]];
    pool.clear();
  }
  const int64_t above = s.collect(logits, n, std::nextafterf(bound, INFINITY), n, ids.data());
  for (int64_t j = 0; j < above; j++) pool.push_back(order_key(logits[ids[j]], ids[j]));
  if (above >= k) {
    std::nth_element(pool.begin(), pool.begin() + (k - 1), pool.end());
  } else {  // the rest are equal, lowest ids first: among the first k that are not below
    const int64_t count = s.collect(logits, n, bound, k, ids.data());
    for (int64_t j = 0; j < count && (int64_t)pool.size() < k; j++)
      if (logits[ids[j]] == bound) pool.push_back(order_key(bound, ids[j]));
  }
  pool.resize(k);
}

// top-p and min-p over a listed top-k, then the draw
inline int64_t draw_listed(const Sampler& s, const float* logits, float top, const Sampling& p, const NoiseKey& key,
                           std::vector<uint64_t>& pool) {
  static thread_local std::vector<int32_t> ids;
  static thread_local std::vector<float> values;
  static thread_local std::vector<double> weight;
  int64_t kept = (int64_t)pool.size();
  ids.resize(kept);
  values.resize(kept);
  weight.resize(kept);
  if (p.top_p < 1.0 || p.min_p > 0.0) std::sort(pool.begin(), pool.end());
  for (int64_t j = 0; j < kept; j++) values[j] = logits[ids[j] = (int32_t)(uint32_t)pool[j]];
  if (p.top_p < 1.0 || p.min_p > 0.0) s.weights(values.data(), kept, p.temperature, top, weight.data());
  if (p.top_p < 1.0) {
    double total = 0, reached = 0;
    for (double w : weight) total += w;
    for (int64_t j = 0; j < kept; j++) {
      reached += weight[j];
      if (reached >= p.top_p * total) kept = j + 1;
    }
  }
  if (p.min_p > 0.0)  // the first always stays: its weight is 1, and something must be drawn
    while (kept > 1 && weight[kept - 1] < p.min_p) kept--;
  return s.draw_list(ids.data(), values.data(), kept, p.temperature, key);
}

inline int64_t sample_row(const Kernels* kernels, const float* logits, int64_t n, const Sampling& p) {
  static thread_local std::vector<float> groups;
  static thread_local std::vector<uint64_t> pool;
  const Sampler& s = kernels->sampler;
  const bool greedy = p.temperature < 1e-5f;
  const int64_t k = greedy || p.top_k <= 0 || p.top_k >= n ? 0 : p.top_k;
  const int64_t fold = std::max<int64_t>(1, std::min<int64_t>(16, n / (8 * std::max<int64_t>(k, 1))));
  if (k) groups.resize((n + 64 * fold - 1) / (64 * fold) * 16);
  const float most = s.peak(logits, n, fold, k ? groups.data() : nullptr);
  const float top = most / p.temperature;
  const NoiseKey key{p.seed, p.index, p.choice, 0};
  Cut cut{-INFINITY, n};
  if (k) {
    best_k(s, logits, n, k, groups, pool);
    if (k <= kListed) return draw_listed(s, logits, top, p, key, pool);
    const uint32_t last = (uint32_t)pool[k - 1];
    cut = Cut{logits[last], (int64_t)last + 1};
  }
  int32_t first[64];
  if (!s.collect(logits, n, most, 1, first)) return 0;  // NaN alone
  if (greedy || most == -INFINITY) return first[0];
  Cut cuts[2] = {cut, cut};
  for (;;) {
    const int64_t id = s.draw(logits, n, p.temperature, top, first[0], cuts[0], p.min_p, key);
    if (p.top_p >= 1.0 || id == first[0]) return id;
    cuts[0] = Cut{logits[id], id};
    double sum[2];
    const double error = s.rough_mass(logits, n, p.temperature, top, cuts, sum);
    if (sum[0] * (1 + error) < p.top_p * sum[1] * (1 - error)) return id;
    if (error < 0.5 && sum[0] * (1 - error) > p.top_p * sum[1] * (1 + error)) continue;
    s.mass(logits, n, p.temperature, top, cuts, sum);
    if (!(sum[0] >= p.top_p * sum[1])) return id;
  }
}

}  // namespace spec
