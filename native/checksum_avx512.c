/* XXH3-64 with AVX512; called only on CPUs that have it. Empty on other architectures. */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif

#define XXH_VECTOR XXH_AVX512
#define BKV_VARIANT(name) bkv_##name##_avx512
/* Stores 64 bytes at a multiple of 64, past the caches. */
#define BKV_STREAM(target, source) _mm512_stream_si512((__m512i *)(target), _mm512_loadu_si512(source))
#include "checksum_variant.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int bkv_avx512_not_here;
#endif
