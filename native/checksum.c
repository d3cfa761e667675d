/* Chooses among the compiled variants. */
#include "checksum.h"

typedef uint64_t hash_function(const void *, uint64_t);
typedef uint64_t hash_pieces_function(const struct iovec *, uint64_t);
typedef void stream_function(uint8_t *, const uint8_t *, uint64_t);

hash_function bkv_hash_baseline;
hash_pieces_function bkv_hash_pieces_baseline;
stream_function bkv_stream_baseline;
#if defined(__x86_64__)
hash_function bkv_hash_avx2, bkv_hash_avx512;
hash_pieces_function bkv_hash_pieces_avx2, bkv_hash_pieces_avx512;
stream_function bkv_stream_avx2, bkv_stream_avx512;
#endif

static struct {
    hash_function *hash;
    hash_pieces_function *hash_pieces;
    stream_function *stream;
    const char *name;
} chosen = {bkv_hash_baseline, bkv_hash_pieces_baseline, bkv_stream_baseline, "baseline"};

/* Before main and before any thread, so that readers need no synchronisation. */
__attribute__((constructor)) static void choose(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) {
        chosen.hash = bkv_hash_avx512;
        chosen.hash_pieces = bkv_hash_pieces_avx512;
        chosen.stream = bkv_stream_avx512;
        chosen.name = "avx512";
    } else if (__builtin_cpu_supports("avx2")) {
        chosen.hash = bkv_hash_avx2;
        chosen.hash_pieces = bkv_hash_pieces_avx2;
        chosen.stream = bkv_stream_avx2;
        chosen.name = "avx2";
    }
#endif
}

uint64_t bkv_checksum(const void *data, uint64_t length_bytes)
{
    return chosen.hash(data, length_bytes);
}

uint64_t bkv_checksum_pieces(const struct iovec *pieces, uint64_t count)
{
    return chosen.hash_pieces(pieces, count);
}

void bkv_checksum_leaves(const void *data, uint64_t length_bytes, uint64_t leaf_bytes, uint64_t *values)
{
    const char *at = data;
    for (uint64_t done = 0, i = 0; done < length_bytes; i++) {
        uint64_t left = length_bytes - done;
        uint64_t n = left < leaf_bytes ? left : leaf_bytes;
        values[i] = chosen.hash(at + done, n);
        done += n;
    }
}

void bkv_stream(void *target, const void *source, uint64_t length_bytes)
{
    chosen.stream(target, source, length_bytes);
}

const char *bkv_checksum_variant(void)
{
    return chosen.name;
}
