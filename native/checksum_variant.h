/* The body of one compiled variant of XXH3-64. The including file sets BKV_VARIANT(name) and XXH_VECTOR. */
#define XXH_INLINE_ALL
#include <stdint.h>
#include <sys/uio.h>
#include <xxhash.h>

uint64_t BKV_VARIANT(hash)(const void *data, uint64_t length_bytes);
uint64_t BKV_VARIANT(hash_pieces)(const struct iovec *pieces, uint64_t count);

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
