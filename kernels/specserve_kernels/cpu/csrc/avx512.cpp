// The kernels for x86-64 with AVX-512 F, BW, VL and DQ.
#define SPEC_NS avx512
#define SPEC_AVX512
#include "kernels.h"

namespace spec {
const Kernels* avx512_kernels() {
  using namespace avx512;
  static const Kernels table = {"avx512",
                                thread_nothing,
                                thread_nothing,
                                gemm_generic,
                                __builtin_cpu_supports("avx512vnni") ? gemm_int8_vnni : gemm_int8_generic,
                                quantize,
                                embed_int8,
                                embed,
                                rms_norm,
                                rope,
                                silu_mul,
                                attention_scratch_generic,
                                attention_begin_generic,
                                attention_split_generic,
                                attention_merge_generic,
                                attention_store_generic,
                                noise,
                                sampler};
  return &table;
}
}  // namespace spec
