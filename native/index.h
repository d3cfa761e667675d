/* The index of a store in memory: encoded PUT records by key digest, in the order in which they would leave.
 *
 * A record is kept as it lies on media, behind a header of 16 bytes, in one growing arena; a table of positions finds
 * it, a doubly linked list gives the order. Besides the record that is about 24 bytes a chunk. Entries are named by
 * their position in the arena, which stays valid until the entry is removed, and while it is leased.
 *
 * Not here: locking (callers serialise), I/O, what a record means beyond what record.h reads of it.
 */
#ifndef BKV_INDEX_H
#define BKV_INDEX_H

#include <stdint.h>

#include "engine.h"
#include "record.h"

struct bkv_index;

struct bkv_index_totals {
    uint64_t chunks;
    uint64_t record_bytes, payload_bytes, extents; /* of the chunks */
    uint64_t leased;                               /* entries with leases, removed ones among them */
    uint64_t resident_bytes;
};

/* A table of chunks: one item each, in the order in which they would leave. NULL columns are left out. */
struct bkv_index_columns {
    uint32_t *layout_ids;
    uint32_t *record_bytes;
    uint64_t *log_sequences;
    uint64_t *payload_bytes;
    uint8_t *digests; /* of BKV_DIGEST_BYTES */
    uint64_t *extents; /* pairs (start, count), as many as there are extents; not one an entry */
};

/* NULL when there is no memory. `seed` keeps whoever chose the digests from choosing where they go. */
struct bkv_index *bkv_index_new(uint64_t seed);
void bkv_index_free(struct bkv_index *index);
void bkv_index_totals(const struct bkv_index *index, struct bkv_index_totals *totals);

/* Makes room for so many chunks at once. 0 or -ENOMEM. */
int bkv_index_reserve(struct bkv_index *index, uint64_t chunks);

/* Adds an entry, last to leave: a PUT record that was checked, and what of `bytes` follows it is its KEY_TAIL record.
 * The position, -EEXIST, or -ENOMEM. */
int64_t bkv_index_insert(struct bkv_index *index, const uint8_t *records, uint64_t bytes);

/* Adds every record of a page body, of one digest the last. 0; -EINVAL, with nothing added, unless all of them are PUT
 * records that are right and fill the body; -ENOMEM. */
int bkv_index_load(struct bkv_index *index, const uint8_t *body, uint64_t body_bytes, uint32_t record_count,
                   uint64_t data_units);

/* The entry with this digest, or 0. */
uint32_t bkv_index_find(const struct bkv_index *index, const uint8_t *digest);

/* Takes an entry out. Its records stay readable until `bkv_index_drop`. */
void bkv_index_remove(struct bkv_index *index, uint32_t entry);
/* Forgets a removed entry that has no leases. */
void bkv_index_drop(struct bkv_index *index, uint32_t entry);

/* Makes an entry the last to leave. */
void bkv_index_touch(struct bkv_index *index, uint32_t entry);

/* The encoded records of an entry; valid until the next call that adds something. */
const uint8_t *bkv_index_records(const struct bkv_index *index, uint32_t entry, uint32_t *bytes);

/* Adds up `change` and the pins; returns them, or -EOVERFLOW with nothing changed. */
int bkv_index_pin(struct bkv_index *index, uint32_t entry, int change);

/* Adds a lease, or takes one back; returns how many there are now. */
uint32_t bkv_index_lease(struct bkv_index *index, uint32_t entry);
uint32_t bkv_index_release(struct bkv_index *index, uint32_t entry);
uint32_t bkv_index_leases(const struct bkv_index *index, uint32_t entry);

/* Whether the entry has not been removed. */
int bkv_index_holds(const struct bkv_index *index, uint32_t entry);

/* The next entry in the order, of 0 the first; 0 at the end. */
uint32_t bkv_index_next(const struct bkv_index *index, uint32_t entry);
/* The same among entries without leases and pins. */
uint32_t bkv_index_next_idle(const struct bkv_index *index, uint32_t entry);

/* The first entries to go of those that may: as many as hold `units` units of the data zone together, at most `room`.
 * Returns how many. */
uint32_t bkv_index_victims(const struct bkv_index *index, uint64_t units, uint32_t room, uint32_t *entries);

/* What these entries hold together. */
void bkv_index_sum(const struct bkv_index *index, const uint32_t *entries, uint32_t count,
                   struct bkv_index_totals *totals);

/* Takes entries without leases out and forgets them. Item i of the columns is what entry i had; NULL columns are left
 * out. */
void bkv_index_take(struct bkv_index *index, const uint32_t *entries, uint32_t count,
                    struct bkv_index_columns *columns);

/* Fills in the columns. */
void bkv_index_export(const struct bkv_index *index, struct bkv_index_columns *columns);

/* A snapshot: the records of all entries as of now, in their order, while the index changes. One at a time. */

/* 0, or -EBUSY. */
int bkv_index_snapshot_begin(struct bkv_index *index);
/* Packs records into page bodies, `BKV_PAGE_PAYLOAD_BYTES` apart: their bytes and how many records each has. Returns
 * how many bodies were begun, of at least 2 in `page_count`; 0 after the end; -ENOMEM when an entry that was removed
 * meanwhile could not be kept. */
int bkv_index_snapshot_next(struct bkv_index *index, uint32_t page_count, uint8_t *bodies, uint16_t *body_bytes,
                            uint16_t *record_counts);
void bkv_index_snapshot_end(struct bkv_index *index);

/* Batches: what one call of a get or a put needs of many entries. */

/* The entries of `count` digests; 0 where there is none. */
void bkv_index_find_many(const struct bkv_index *index, const uint8_t *digests, uint32_t count, uint32_t *entries);

/* A wave of puts whose data are written. Item i belongs to transfer `positions[i]` of the batch. */
struct bkv_index_puts {
    const struct bkv_transfer *transfers; /* with their leaves computed */
    const struct bkv_extent *extents;
    const uint64_t *leaf_values;
    const uint32_t *positions;
    uint64_t base_bytes;                  /* of the data zone on the device */
    uint64_t first_log_sequence;          /* that of item 0; they go up by one */
    const uint8_t *digests, *layout_checksums;
    const uint32_t *layout_ids;
    const uint8_t *keys;                  /* one after the other */
    const uint32_t *key_bytes;
    const uint8_t *keys_are_text;
    uint32_t count;
};

/* Encodes and adds them, the last one last to leave. Their records follow each other in `records`, which has room for
 * `room_bytes`, and item i has `record_bytes[i]` of them. Returns the bytes of all; -EEXIST, -ENOMEM or -ENOSPC with
 * nothing added. */
int64_t bkv_index_insert_many(struct bkv_index *index, const struct bkv_index_puts *puts, uint8_t *records,
                              uint64_t room_bytes, uint32_t *record_bytes);

/* Finds the entries of `count` digests, makes them the last to leave and leases them. Returns how many there are, and
 * of each: in `columns`, which has room for four times `count`, the positions of their digests, then their entries,
 * their layouts and how many extents they have, `count` items for each; and their sizes. */
uint32_t bkv_index_acquire(struct bkv_index *index, const uint8_t *digests, uint32_t count, uint32_t *columns,
                           uint64_t *payload_bytes);

/* Takes back a lease of each. Returns how many of them were removed meanwhile and have none any more: they come first
 * in `entries` then, and stay readable until `bkv_index_drop`. */
uint32_t bkv_index_release_many(struct bkv_index *index, uint32_t *entries, uint32_t count);

/* The transfers that read entries, and their extents, behind `base_bytes` on the device. `segment_counts` are those of
 * the memory, in the same order. Returns how many leaves they have together, 0 without `hashed`. */
uint64_t bkv_index_transfers(const struct bkv_index *index, const uint32_t *entries, uint32_t count,
                             uint64_t base_bytes, int hashed, const uint32_t *segment_counts,
                             struct bkv_transfer *transfers, struct bkv_extent *extents);

/* Looks at transfers that have read entries: 1 in `exact` where it succeeded and its leaves, with the 16-byte layout
 * checksum that belongs to it, are those of its entry, else 0. Returns how many are not exact. */
uint32_t bkv_index_verify(const struct bkv_index *index, const uint32_t *entries, uint32_t count,
                          const struct bkv_transfer *transfers, const uint64_t *leaf_values,
                          const uint8_t *layout_checksums, uint8_t *exact);

/* The transfers that write new chunks, in the order of their extents and memory segments. An extent comes in units and
 * leaves as bytes behind `base_bytes` on the device. Returns how many leaves they have together. */
uint64_t bkv_put_transfers(const uint64_t *payload_bytes, const uint32_t *extent_counts, const uint32_t *segment_counts,
                           uint32_t count, uint64_t base_bytes, struct bkv_extent *extents,
                           struct bkv_transfer *transfers);

#endif
