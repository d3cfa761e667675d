/* XXH3-64 with AVX2; called only on CPUs that have it. Empty on other architectures. */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#define XXH_VECTOR XXH_AVX2
#define BKV_VARIANT(name) bkv_##name##_avx2
/* Stores 64 bytes at a multiple of 64, past the caches. */
#define BKV_STREAM(target, source)                                                                       \
    do {                                                                                                 \
        _mm256_stream_si256((__m256i *)(target), _mm256_loadu_si256((const __m256i *)(source)));         \
        _mm256_stream_si256((__m256i *)(target) + 1, _mm256_loadu_si256((const __m256i *)(source) + 1)); \
    } while (0)
#include "checksum_variant.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int bkv_avx2_not_here;
#endif
