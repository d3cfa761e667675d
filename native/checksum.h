/* Leaf checksums, XXH3-64 with seed 0, and copies, with the widest vector instructions this CPU has.
 *
 * The distribution's libxxhash is built for the oldest CPU of the architecture; on x86 that halves its
 * speed. So the header is compiled here once per instruction set and chosen at run time.
 */
#ifndef BKV_CHECKSUM_H
#define BKV_CHECKSUM_H

#include <stdint.h>
#include <sys/uio.h>

/* XXH3-64 of one piece of memory. */
uint64_t bkv_checksum(const void *data, uint64_t length_bytes);

/* XXH3-64 of the concatenation of `count` pieces. */
uint64_t bkv_checksum_pieces(const struct iovec *pieces, uint64_t count);

/* XXH3-64 of every `leaf_bytes` of the memory, the last leaf short; `values` has room for all of them. */
void bkv_checksum_leaves(const void *data, uint64_t length_bytes, uint64_t leaf_bytes, uint64_t *values);

/* A copy to memory that is not read soon: past the caches where possible, which saves reading what is overwritten. */
void bkv_stream(void *target, const void *source, uint64_t length_bytes);

/* "avx512", "avx2" or "baseline". */
const char *bkv_checksum_variant(void);

#endif
