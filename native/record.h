/* PUT records as they lie on media: what the index reads of them, and how they are checked.
 *
 * The fields are those of blockkv.format.record.PUT_RECORD, where they are explained; a test holds the two together.
 */
#ifndef BKV_RECORD_H
#define BKV_RECORD_H

#include <stdint.h>

#include "engine.h"

enum {
    BKV_PUT_OPERATION = 1,
    BKV_DIGEST_BYTES = 32,
    BKV_ROOT_BYTES = 16,
    BKV_PUT_BYTES = 76,           /* the fixed part */
    BKV_PAGE_PAYLOAD_BYTES = 4016, /* records of one page */
    BKV_MAX_KEY_BYTES = 4096,
    BKV_MAX_EXTENTS = 192,
    BKV_MAX_LEAVES = 256,
    BKV_LEAF_BYTES = 131072,
        BKV_EXTENT_COUNT_SHIFT = 40, /* an extent: the start below, the count above */
    BKV_KEY_TAIL_OPERATION = 4,
    BKV_KEY_TAIL_BYTES = 50,     /* the fixed part */
    BKV_RECORDS_BYTES = 8192,    /* more than a PUT record and its KEY_TAIL record can have */
};

/* Fixed part of a PUT record. It is followed by extents, leaf checksums and key, padded to a multiple of 8. */
struct bkv_put {
    uint16_t record_bytes;
    uint8_t operation;
    uint8_t extent_count;
    uint32_t layout_id;
    uint64_t log_sequence;
    uint8_t digest[32];
    uint64_t payload_bytes;
    uint8_t root[16];
    uint16_t key_bytes;
    uint8_t flags;
    uint8_t reserved;
};

/* An extent, in units of the data zone. */
struct bkv_units {
    uint64_t start, count;
};

/* Bytes per leaf checksum of a payload. */
uint64_t bkv_leaf_bytes(uint64_t payload_bytes);

/* The fixed part of a record, wherever it lies. */
struct bkv_put bkv_put_at(const uint8_t *record);

/* Extent `number` of a record. */
struct bkv_units bkv_put_extent(const uint8_t *record, uint32_t number);

/* The length of the PUT record there, or 0 where there is none that is right in every respect. What is accepted here
 * blockkv.format.record.iterate_records accepts too. */
uint32_t bkv_put_check(const uint8_t *record, uint64_t room_bytes, uint64_t data_units);

/* What a new chunk's records are made of. */
struct bkv_new_put {
    uint64_t log_sequence;
    uint64_t payload_bytes;
    uint32_t layout_id;
    uint32_t key_bytes;
    int key_is_text;
    const uint8_t *digest, *layout_checksum, *key;
    const struct bkv_extent *extents; /* on the device */
    uint32_t extent_count;
    uint32_t leaf_count;
    const uint64_t *leaves;
    uint64_t base_bytes;              /* of the data zone on the device */
};

/* Encodes the PUT record, and the KEY_TAIL record where the key is longer than its page leaves room for. Returns their
 * length; `records` has room for BKV_RECORDS_BYTES. */
uint32_t bkv_put_encode(const struct bkv_new_put *put, uint8_t *records);

/* The root checksum of a chunk, 16 bytes, over its key digest, its size, the checksum of its layout (16 bytes) and its
 * leaf checksums, of which there are at most BKV_MAX_LEAVES. */
void bkv_root_checksum(const uint8_t *digest, uint64_t payload_bytes, const uint8_t *layout_checksum,
                       const uint64_t *leaves, uint32_t leaf_count, uint8_t *root);

#endif
