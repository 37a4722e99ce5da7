// Drawing one token from one row of processed logits: temperature, truncation, noise, argmax (DESIGN 2). What
// truncation drops becomes -inf; the noise is then drawn where it can still decide.
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

// ascending order of these is the stable order: logit descending, id ascending; -0 and 0 are equal
inline uint64_t order_key(float logit, int64_t id) {
  const float f = logit + 0.0f;
  uint32_t u;
  memcpy(&u, &f, 4);
  u = u >> 31 ? ~u : u | 0x80000000u;
  return (uint64_t)~u << 32 | (uint32_t)id;
}

// The shortest prefix of `pool` (best first) whose weight reaches `wanted`, moved to the front; its length, at least 1.
inline int64_t shortest_prefix(std::vector<uint64_t>& pool, const double* weight, double wanted) {
  const int64_t n = pool.size();
  double reached = 0;
  for (int64_t done = 0, size = 256; done < n; size *= 4) {
    const int64_t end = std::min(n, done + size);
    if (end < n) std::nth_element(pool.begin() + done, pool.begin() + end, pool.end());
    std::sort(pool.begin() + done, pool.begin() + end);
    for (; done < end; done++) {
      reached += weight[(uint32_t)pool[done]];
      if (reached >= wanted) return done + 1;
    }
  }
  return n;
}

inline int64_t first_largest(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

inline int64_t sample_row(const Kernels* kernels, const float* logits, int64_t vocab, const Sampling& p) {
  static thread_local std::vector<float> scaled;
  static thread_local std::vector<double> weight;
  static thread_local std::vector<uint64_t> pool;
  if (p.temperature < 1e-5f) return first_largest(logits, vocab);
  scaled.resize(vocab);
  for (int64_t i = 0; i < vocab; i++) scaled[i] = logits[i] / p.temperature;
  const bool by_k = p.top_k > 0 && p.top_k < vocab, by_p = p.top_p < 1.0, by_min = p.min_p > 0.0;
  if (by_k || by_p || by_min) {
    const float top = scaled[first_largest(scaled.data(), vocab)];
    int64_t kept = vocab;
    pool.resize(vocab);
    weight.resize(vocab);
    double total = kernels->weights(scaled.data(), vocab, top, weight.data());
    if (by_k || by_p)
      for (int64_t i = 0; i < vocab; i++) pool[i] = order_key(logits[i], i);
    if (by_k) {
      kept = p.top_k;
      std::nth_element(pool.begin(), pool.begin() + kept, pool.end());
      pool.resize(kept);
      if (by_p) {  // the sum in best-first order: that of nth_element is the library's secret
        std::sort(pool.begin(), pool.end());
        total = 0;
        for (uint64_t key : pool) total += weight[(uint32_t)key];
      }
    }
    if (by_p) kept = shortest_prefix(pool, weight.data(), p.top_p * total);
    if (by_k || by_p) {
      std::vector<float>& all = scaled;
      static thread_local std::vector<float> left;
      left.assign(vocab, -INFINITY);
      for (int64_t i = 0; i < kept; i++) left[(uint32_t)pool[i]] = all[(uint32_t)pool[i]];
      all.swap(left);
    }
    if (by_min)  // the largest is always among what is left: its weight is 1
      for (int64_t i = 0; i < vocab; i++)
        if (weight[i] < p.min_p) scaled[i] = -INFINITY;
  }
  return kernels->draw(scaled.data(), vocab, p.seed, p.index, p.choice, 0);
}

}  // namespace spec
