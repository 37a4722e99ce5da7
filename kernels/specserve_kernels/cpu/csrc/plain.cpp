// The kernels for any machine: GCC vector extensions over whatever the baseline has.
#define SPEC_NS plain
#include "kernels.h"

namespace spec {
const Kernels* plain_kernels() {
  using namespace plain;
  static const Kernels table = {"plain",
                                thread_nothing,
                                thread_nothing,
                                gemm_generic,
                                gemm_int8_generic,
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
