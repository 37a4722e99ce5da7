// The int8 GEMM for x86-64 with AVX-512 and VNNI; all else such a machine runs is in avx512.cpp.
#define SPEC_NS vnni
#define SPEC_AVX512
#define SPEC_VNNI
#include "kernels.h"

namespace spec {
void gemm_int8_vnni(const Gemm& g, int tid, int nth) { vnni::gemm_int8_generic(g, tid, nth); }
}  // namespace spec
