#define _GNU_SOURCE
#include "record.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");
_Static_assert(offsetof(struct bkv_put, reserved) + 1 == BKV_PUT_BYTES, "no padding between the fields");

#define COUNTER_LIMIT (1ULL << 62)
#define EXTENT_START_MASK ((1ULL << BKV_EXTENT_COUNT_SHIFT) - 1)
#define MAX_PAYLOAD_BYTES (1ULL << 52) /* of the whole data zone: 2^40 units of 4 KiB */

uint64_t bkv_leaf_bytes(uint64_t payload_bytes)
{
    uint64_t leaf_bytes = BKV_LEAF_BYTES;
    while (payload_bytes > leaf_bytes * BKV_MAX_LEAVES)
        leaf_bytes *= 2;
    return leaf_bytes;
}

struct bkv_put bkv_put_at(const uint8_t *record)
{
    struct bkv_put put = {0};
    memcpy(&put, record, BKV_PUT_BYTES);
    return put;
}

struct bkv_units bkv_put_extent(const uint8_t *record, uint32_t number)
{
    uint64_t word;
    memcpy(&word, record + BKV_PUT_BYTES + 8 * (uint64_t)number, sizeof word);
    return (struct bkv_units){word & EXTENT_START_MASK, word >> BKV_EXTENT_COUNT_SHIFT};
}

/* Whether the extents lie in the data zone, do not overlap and hold the payload exactly. */
static bool extents_are_right(const uint8_t *record, const struct bkv_put *put, uint64_t data_units)
{
    struct bkv_units sorted[BKV_MAX_EXTENTS];
    uint64_t total = 0, end = 0;
    for (uint32_t i = 0; i < put->extent_count; i++) {
        struct bkv_units extent = bkv_put_extent(record, i);
        uint32_t at = i;
        for (; at && sorted[at - 1].start > extent.start; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = extent;
    }
    for (uint32_t i = 0; i < put->extent_count; i++) {
        if (!sorted[i].count || sorted[i].start < end || sorted[i].start + sorted[i].count > data_units)
            return false;
        total += sorted[i].count;
        end = sorted[i].start + sorted[i].count;
    }
    return total == (put->payload_bytes + BKV_UNIT_BYTES - 1) / BKV_UNIT_BYTES;
}

uint32_t bkv_put_check(const uint8_t *record, uint64_t room_bytes, uint64_t data_units)
{
    if (room_bytes < BKV_PUT_BYTES)
        return 0;
    struct bkv_put put = bkv_put_at(record);
    if (put.operation != BKV_PUT_OPERATION || put.record_bytes > room_bytes || put.flags > 1 || put.reserved
        || put.key_bytes > BKV_MAX_KEY_BYTES || put.log_sequence >= COUNTER_LIMIT || !put.payload_bytes
        || put.payload_bytes > MAX_PAYLOAD_BYTES || put.extent_count > BKV_MAX_EXTENTS)
        return 0;
    uint64_t leaf_bytes = bkv_leaf_bytes(put.payload_bytes);
    uint64_t used = BKV_PUT_BYTES + 8 * put.extent_count + 8 * ((put.payload_bytes + leaf_bytes - 1) / leaf_bytes);
    if (used > put.record_bytes)
        return 0;
    uint64_t key_room = BKV_PAGE_PAYLOAD_BYTES - used;
    used += put.key_bytes < key_room ? put.key_bytes : key_room;
    uint64_t whole = (used + 7) & ~7ULL;
    if (put.record_bytes != whole || !extents_are_right(record, &put, data_units))
        return 0;
    for (; used < whole; used++)
        if (record[used])
            return 0;
    return (uint32_t)whole;
}

void bkv_root_checksum(const uint8_t *digest, uint64_t payload_bytes, const uint8_t *layout_checksum,
                       const uint64_t *leaves, uint32_t leaf_count, uint8_t *root)
{
    uint8_t covered[BKV_DIGEST_BYTES + 8 + BKV_ROOT_BYTES + 8 * BKV_MAX_LEAVES];
    uint8_t *at = covered;
    if (leaf_count > BKV_MAX_LEAVES)
        leaf_count = BKV_MAX_LEAVES;
    at = mempcpy(at, digest, BKV_DIGEST_BYTES);
    at = mempcpy(at, &payload_bytes, sizeof payload_bytes);
    at = mempcpy(at, layout_checksum, BKV_ROOT_BYTES);
    at = mempcpy(at, leaves, 8 * (uint64_t)leaf_count);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(covered, (size_t)(at - covered)));
    memcpy(root, canonical.digest, BKV_ROOT_BYTES);
}

/* Zeroes up to a multiple of 8; returns the whole length. */
static uint32_t pad(uint8_t *record, uint32_t used)
{
    uint32_t whole = (used + 7) & ~7U;
    memset(record + used, 0, whole - used);
    return whole;
}

static uint32_t encode_tail(const struct bkv_new_put *put, uint32_t key_done, uint8_t *record)
{
    uint16_t tail_bytes = (uint16_t)(put->key_bytes - key_done);
    memset(record, 0, BKV_KEY_TAIL_BYTES);
    record[2] = BKV_KEY_TAIL_OPERATION;
    memcpy(record + 8, &put->log_sequence, sizeof put->log_sequence);
    memcpy(record + 16, put->digest, BKV_DIGEST_BYTES);
    memcpy(record + 48, &tail_bytes, sizeof tail_bytes);
    memcpy(record + BKV_KEY_TAIL_BYTES, put->key + key_done, tail_bytes);
    uint16_t whole = (uint16_t)pad(record, BKV_KEY_TAIL_BYTES + tail_bytes);
    memcpy(record, &whole, sizeof whole);
    return whole;
}

uint32_t bkv_put_encode(const struct bkv_new_put *put, uint8_t *records)
{
    struct bkv_put fixed = {
        .operation = BKV_PUT_OPERATION,
        .extent_count = (uint8_t)put->extent_count,
        .layout_id = put->layout_id,
        .log_sequence = put->log_sequence,
        .payload_bytes = put->payload_bytes,
        .key_bytes = (uint16_t)put->key_bytes,
        .flags = put->key_is_text ? 1 : 0,
    };
    memcpy(fixed.digest, put->digest, BKV_DIGEST_BYTES);
    bkv_root_checksum(put->digest, put->payload_bytes, put->layout_checksum, put->leaves, put->leaf_count, fixed.root);
    uint32_t used = BKV_PUT_BYTES;
    for (uint32_t i = 0; i < put->extent_count; i++, used += 8) {
        uint64_t start = (put->extents[i].offset_bytes - put->base_bytes) / BKV_UNIT_BYTES;
        uint64_t word = start | put->extents[i].length_bytes / BKV_UNIT_BYTES << BKV_EXTENT_COUNT_SHIFT;
        memcpy(records + used, &word, sizeof word);
    }
    memcpy(records + used, put->leaves, 8 * (uint64_t)put->leaf_count);
    used += 8 * put->leaf_count;
    uint32_t room = BKV_PAGE_PAYLOAD_BYTES - used;
    uint32_t key_done = put->key_bytes < room ? put->key_bytes : room;
    memcpy(records + used, put->key, key_done);
    fixed.record_bytes = (uint16_t)pad(records, used + key_done);
    memcpy(records, &fixed, BKV_PUT_BYTES);
    if (key_done == put->key_bytes)
        return fixed.record_bytes;
    return fixed.record_bytes + encode_tail(put, key_done, records + fixed.record_bytes);
}
