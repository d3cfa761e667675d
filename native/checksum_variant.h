/* The body of one compiled variant. The including file sets BKV_VARIANT(name) and XXH_VECTOR, and BKV_STREAM where
 * there are stores that bypass the caches. */
#define XXH_INLINE_ALL
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <xxhash.h>

uint64_t BKV_VARIANT(hash)(const void *data, uint64_t length_bytes);
uint64_t BKV_VARIANT(hash_pieces)(const struct iovec *pieces, uint64_t count);

void BKV_VARIANT(stream)(uint8_t *target, const uint8_t *source, uint64_t length_bytes);

uint64_t BKV_VARIANT(hash)(const void *data, uint64_t length_bytes)
{
    return XXH3_64bits(data, length_bytes);
}

uint64_t BKV_VARIANT(hash_pieces)(const struct iovec *pieces, uint64_t count)
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset(&state);
    for (uint64_t i = 0; i < count; i++)
        XXH3_64bits_update(&state, pieces[i].iov_base, pieces[i].iov_len);
    return XXH3_64bits_digest(&state);
}

void BKV_VARIANT(stream)(uint8_t *target, const uint8_t *source, uint64_t length_bytes)
{
#ifdef BKV_STREAM
    uint64_t at = -(uintptr_t)target % 64;
    if (at > length_bytes)
        at = length_bytes;
    memcpy(target, source, at);
    for (; at + 64 <= length_bytes; at += 64)
        BKV_STREAM(target + at, source + at);
    memcpy(target + at, source + at, length_bytes - at);
    _mm_sfence(); /* before anybody is told that the data are there */
#else
    memcpy(target, source, length_bytes);
#endif
}
