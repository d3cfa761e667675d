#define _GNU_SOURCE
#include "index.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    WORD = 8,                      /* positions count these */
    NODE_WORDS = 2,                /* the header */
    LONGEST_WORDS = NODE_WORDS + 2 * BKV_PAGE_PAYLOAD_BYTES / WORD,
    SHORTEST_WORDS = NODE_WORDS + (BKV_PUT_BYTES + 3 * WORD - 1) / WORD, /* with an extent, a leaf, a key of one byte */
    FIRST_ARENA_BYTES = 1 << 20,
    FIRST_BUCKETS = 1 << 10,
    AHEAD = 8,                     /* buckets whose entries are fetched while the table grows */
};

enum {
    LISTED = 1,  /* in the table and in the order */
    TAIL = 2,    /* a KEY_TAIL record follows the PUT record */
    PARITY = 4,  /* equal to the index's: the snapshot has this entry, or it came later */
};

struct node {
    uint32_t older, newer;
    uint32_t leases;
    uint16_t pins;
    uint16_t flags;
};

/* A free piece of the arena. */
struct gap {
    uint32_t next;
    uint32_t words;
};

struct snapshot {
    bool active, failed;
    uint32_t cursor;               /* the next entry to write */
    uint8_t *saved;                /* records of entries that were removed before it came to them */
    uint64_t saved_bytes, saved_room, saved_done;
};

struct bkv_index {
    uint64_t seed;
    uint8_t *arena;
    uint64_t arena_bytes;          /* mapped; untouched pages of it are not resident */
    uint32_t end;                  /* first word never used */
    uint32_t gaps[LONGEST_WORDS + 1]; /* free pieces by their length */
    uint64_t gap_sizes[LONGEST_WORDS / 64 + 1]; /* bit n: there are gaps of n words */
    uint32_t *buckets;
    uint64_t bucket_count;
    uint32_t oldest, newest;
    uint16_t parity;
    struct snapshot snapshot;
    uint64_t chunks, record_bytes, payload_bytes, extents, leased;
};

_Static_assert(sizeof(struct node) == NODE_WORDS * WORD, "the records behind it stay aligned");

static struct node *node_at(const struct bkv_index *index, uint32_t entry)
{
    return (struct node *)(index->arena + (uint64_t)entry * WORD);
}

static const uint8_t *record_of(const struct node *node)
{
    return (const uint8_t *)(node + 1);
}

/* Records are aligned in the arena. */
static const struct bkv_put *put_of(const struct node *node)
{
    return (const struct bkv_put *)(node + 1);
}

static uint32_t bytes_of(const struct node *node)
{
    uint16_t bytes = put_of(node)->record_bytes, tail = 0;
    if (node->flags & TAIL)
        memcpy(&tail, record_of(node) + bytes, sizeof tail);
    return (uint32_t)bytes + tail;
}

/* The arena */

static int grow_arena(struct bkv_index *index, uint64_t bytes)
{
    uint64_t wanted = index->arena_bytes;
    while (wanted < bytes)
        wanted += wanted / 2;
    wanted = (wanted + 0xFFFFF) & ~0xFFFFFULL;
    if (bytes / WORD > UINT32_MAX)
        return -ENOMEM;
    void *moved = mremap(index->arena, index->arena_bytes, wanted, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED)
        return -ENOMEM;
    index->arena = moved;
    index->arena_bytes = wanted;
    return 0;
}

static void add_gap(struct bkv_index *index, uint32_t at, uint32_t words)
{
    *(struct gap *)(index->arena + (uint64_t)at * WORD) = (struct gap){index->gaps[words], words};
    index->gaps[words] = at;
    index->gap_sizes[words / 64] |= 1ULL << words % 64;
}

static uint32_t take_gap(struct bkv_index *index, uint32_t words)
{
    uint32_t at = index->gaps[words];
    index->gaps[words] = ((struct gap *)(index->arena + (uint64_t)at * WORD))->next;
    if (!index->gaps[words])
        index->gap_sizes[words / 64] &= ~(1ULL << words % 64);
    return at;
}

/* The shortest gap of at least so many words, or 0. */
static uint32_t gap_of(const struct bkv_index *index, uint32_t words)
{
    if (words > LONGEST_WORDS)
        return 0;
    uint64_t bits = index->gap_sizes[words / 64] & ~0ULL << words % 64;
    for (uint32_t i = words / 64;;) {
        if (bits)
            return i * 64 + (uint32_t)__builtin_ctzll(bits);
        if (++i > LONGEST_WORDS / 64)
            return 0;
        bits = index->gap_sizes[i];
    }
}

/* 0 when there is no memory. A gap is divided only where another entry fits into what is left. */
static uint32_t take_words(struct bkv_index *index, uint32_t words)
{
    if (index->gaps[words])
        return take_gap(index, words);
    uint32_t longer = gap_of(index, words + SHORTEST_WORDS);
    if (longer) {
        uint32_t at = take_gap(index, longer);
        add_gap(index, at + words, longer - words);
        return at;
    }
    uint64_t end_bytes = ((uint64_t)index->end + words) * WORD;
    if (end_bytes > index->arena_bytes && grow_arena(index, end_bytes))
        return 0;
    uint32_t at = index->end;
    index->end += words;
    return at;
}

/* The table: open addressing, the home of a digest in proportion to its hash */

static uint64_t home_of(const struct bkv_index *index, const uint8_t *digest)
{
    uint64_t hash = XXH3_64bits_withSeed(digest, BKV_DIGEST_BYTES, index->seed);
    return (uint64_t)((unsigned __int128)hash * index->bucket_count >> 64);
}

static uint64_t bucket_after(const struct bkv_index *index, uint64_t bucket)
{
    return bucket + 1 == index->bucket_count ? 0 : bucket + 1;
}

/* The bucket that holds the digest, or the empty one where it would go. */
static uint64_t bucket_of(const struct bkv_index *index, const uint8_t *digest)
{
    uint64_t bucket = home_of(index, digest);
    for (; index->buckets[bucket]; bucket = bucket_after(index, bucket))
        if (!memcmp(put_of(node_at(index, index->buckets[bucket]))->digest, digest, BKV_DIGEST_BYTES))
            break;
    return bucket;
}

static int resize_table(struct bkv_index *index, uint64_t bucket_count)
{
    uint32_t *old = index->buckets;
    uint64_t old_count = index->bucket_count;
    uint32_t *buckets = calloc(bucket_count, sizeof *buckets);
    if (!buckets)
        return -ENOMEM;
    index->buckets = buckets;
    index->bucket_count = bucket_count;
    for (uint64_t i = 0; i < old_count; i++) {
        if (i + AHEAD < old_count)
            __builtin_prefetch(put_of(node_at(index, old[i + AHEAD]))->digest);
        if (!old[i])
            continue;
        uint64_t bucket = home_of(index, put_of(node_at(index, old[i]))->digest);
        while (buckets[bucket])
            bucket = bucket_after(index, bucket);
        buckets[bucket] = old[i];
    }
    free(old);
    return 0;
}

static void clear_bucket(struct bkv_index *index, uint64_t hole)
{
    uint64_t at = hole;
    for (;;) {
        index->buckets[hole] = 0;
        uint64_t home;
        do {
            at = bucket_after(index, at);
            if (!index->buckets[at])
                return;
            home = home_of(index, put_of(node_at(index, index->buckets[at]))->digest);
            /* it stays where its home lies cyclically behind the hole, and not behind itself */
        } while (hole <= at ? hole < home && home <= at : hole < home || home <= at);
        index->buckets[hole] = index->buckets[at];
        hole = at;
    }
}

/* The order */

static void append(struct bkv_index *index, uint32_t entry)
{
    struct node *node = node_at(index, entry);
    node->older = index->newest;
    node->newer = 0;
    if (index->newest)
        node_at(index, index->newest)->newer = entry;
    else
        index->oldest = entry;
    index->newest = entry;
    if (index->snapshot.active && !index->snapshot.cursor && (node->flags & PARITY) != index->parity)
        index->snapshot.cursor = entry;
}

static void unlink_entry(struct bkv_index *index, uint32_t entry)
{
    struct node *node = node_at(index, entry);
    if (index->snapshot.cursor == entry)
        index->snapshot.cursor = node->newer;
    if (node->older)
        node_at(index, node->older)->newer = node->newer;
    else
        index->oldest = node->newer;
    if (node->newer)
        node_at(index, node->newer)->older = node->older;
    else
        index->newest = node->older;
}

/* Opening and closing */

struct bkv_index *bkv_index_new(uint64_t seed)
{
    struct bkv_index *index = calloc(1, sizeof *index);
    if (!index)
        return NULL;
    index->seed = seed;
    index->end = 1; /* position 0 means none */
    index->arena_bytes = FIRST_ARENA_BYTES;
    index->arena = mmap(NULL, index->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (index->arena == MAP_FAILED) {
        free(index);
        return NULL;
    }
    if (resize_table(index, FIRST_BUCKETS)) {
        bkv_index_free(index);
        return NULL;
    }
    return index;
}

void bkv_index_free(struct bkv_index *index)
{
    if (!index)
        return;
    munmap(index->arena, index->arena_bytes);
    free(index->buckets);
    free(index->snapshot.saved);
    free(index);
}

void bkv_index_totals(const struct bkv_index *index, struct bkv_index_totals *totals)
{
    *totals = (struct bkv_index_totals){
        .chunks = index->chunks,
        .record_bytes = index->record_bytes,
        .payload_bytes = index->payload_bytes,
        .extents = index->extents,
        .leased = index->leased,
        .resident_bytes = (uint64_t)index->end * WORD + index->bucket_count * sizeof *index->buckets
                          + index->snapshot.saved_room + sizeof *index,
    };
}

/* Entries */

/* Room for one more: at least a quarter of the buckets stays empty. */
static int make_room(struct bkv_index *index)
{
    if ((index->chunks + 1) * 4 <= index->bucket_count * 3)
        return 0;
    return resize_table(index, index->bucket_count + index->bucket_count / 2);
}

int bkv_index_reserve(struct bkv_index *index, uint64_t chunks)
{
    uint64_t bucket_count = chunks + chunks / 2;
    return bucket_count > index->bucket_count ? resize_table(index, bucket_count) : 0;
}

int64_t bkv_index_insert(struct bkv_index *index, const uint8_t *records, uint64_t bytes)
{
    int code = make_room(index);
    if (code)
        return code;
    struct bkv_put put = bkv_put_at(records);
    uint64_t bucket = bucket_of(index, put.digest);
    if (index->buckets[bucket])
        return -EEXIST;
    uint32_t entry = take_words(index, NODE_WORDS + (uint32_t)(bytes / WORD));
    if (!entry)
        return -ENOMEM;
    struct node *node = node_at(index, entry);
    *node = (struct node){.flags = (uint16_t)(LISTED | index->parity | (bytes > put.record_bytes ? TAIL : 0))};
    memcpy(node + 1, records, bytes);
    index->buckets[bucket] = entry;
    append(index, entry);
    index->chunks++;
    index->record_bytes += bytes;
    index->payload_bytes += put.payload_bytes;
    index->extents += put.extent_count;
    return entry;
}

static void save(struct snapshot *snapshot, const struct node *node)
{
    uint32_t bytes = bytes_of(node);
    if (snapshot->saved_bytes + bytes > snapshot->saved_room) {
        uint64_t room = snapshot->saved_room * 2 + 65536;
        uint8_t *saved = realloc(snapshot->saved, room);
        if (!saved) {
            snapshot->failed = true;
            return;
        }
        snapshot->saved = saved;
        snapshot->saved_room = room;
    }
    memcpy(snapshot->saved + snapshot->saved_bytes, record_of(node), bytes);
    snapshot->saved_bytes += bytes;
}

void bkv_index_remove(struct bkv_index *index, uint32_t entry)
{
    struct node *node = node_at(index, entry);
    const struct bkv_put *put = put_of(node);
    if (index->snapshot.active && (node->flags & PARITY) != index->parity)
        save(&index->snapshot, node);
    clear_bucket(index, bucket_of(index, put->digest));
    unlink_entry(index, entry);
    node->flags &= ~LISTED;
    index->chunks--;
    index->record_bytes -= bytes_of(node);
    index->payload_bytes -= put->payload_bytes;
    index->extents -= put->extent_count;
}

void bkv_index_drop(struct bkv_index *index, uint32_t entry)
{
    add_gap(index, entry, NODE_WORDS + bytes_of(node_at(index, entry)) / WORD);
}

int bkv_index_load(struct bkv_index *index, const uint8_t *body, uint64_t body_bytes, uint32_t record_count,
                   uint64_t data_units)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < record_count; i++) {
        uint32_t bytes = bkv_put_check(body + at, body_bytes - at, data_units);
        if (!bytes)
            return -EINVAL;
        struct bkv_put put = bkv_put_at(body + at);
        __builtin_prefetch(&index->buckets[home_of(index, put.digest)]);
        at += bytes;
    }
    if (at != body_bytes)
        return -EINVAL;
    for (at = 0; at < body_bytes;) {
        struct bkv_put put = bkv_put_at(body + at);
        uint32_t earlier = bkv_index_find(index, put.digest);
        if (earlier) {
            bkv_index_remove(index, earlier);
            bkv_index_drop(index, earlier);
        }
        int64_t entry = bkv_index_insert(index, body + at, put.record_bytes);
        if (entry < 0)
            return (int)entry;
        at += put.record_bytes;
    }
    return 0;
}

uint32_t bkv_index_find(const struct bkv_index *index, const uint8_t *digest)
{
    return index->buckets[bucket_of(index, digest)];
}

void bkv_index_touch(struct bkv_index *index, uint32_t entry)
{
    if (index->newest == entry)
        return;
    unlink_entry(index, entry);
    append(index, entry);
}

const uint8_t *bkv_index_records(const struct bkv_index *index, uint32_t entry, uint32_t *bytes)
{
    const struct node *node = node_at(index, entry);
    *bytes = bytes_of(node);
    return record_of(node);
}

int bkv_index_pin(struct bkv_index *index, uint32_t entry, int change)
{
    struct node *node = node_at(index, entry);
    int pins = node->pins + change;
    if (pins < 0 || pins > UINT16_MAX)
        return -EOVERFLOW;
    node->pins = (uint16_t)pins;
    return pins;
}

uint32_t bkv_index_lease(struct bkv_index *index, uint32_t entry)
{
    struct node *node = node_at(index, entry);
    if (!node->leases++)
        index->leased++;
    return node->leases;
}

uint32_t bkv_index_release(struct bkv_index *index, uint32_t entry)
{
    struct node *node = node_at(index, entry);
    if (!--node->leases)
        index->leased--;
    return node->leases;
}

uint32_t bkv_index_leases(const struct bkv_index *index, uint32_t entry)
{
    return node_at(index, entry)->leases;
}

int bkv_index_holds(const struct bkv_index *index, uint32_t entry)
{
    return node_at(index, entry)->flags & LISTED;
}

uint32_t bkv_index_next(const struct bkv_index *index, uint32_t entry)
{
    return entry ? node_at(index, entry)->newer : index->oldest;
}

uint32_t bkv_index_next_idle(const struct bkv_index *index, uint32_t entry)
{
    do
        entry = bkv_index_next(index, entry);
    while (entry && (node_at(index, entry)->leases || node_at(index, entry)->pins));
    return entry;
}

uint32_t bkv_index_victims(const struct bkv_index *index, uint64_t units, uint32_t room, uint32_t *entries)
{
    uint32_t count = 0;
    uint64_t found = 0;
    for (uint32_t entry = 0; count < room && found < units && (entry = bkv_index_next_idle(index, entry));) {
        entries[count++] = entry;
        found += (put_of(node_at(index, entry))->payload_bytes + BKV_UNIT_BYTES - 1) / BKV_UNIT_BYTES;
    }
    return count;
}

void bkv_index_sum(const struct bkv_index *index, const uint32_t *entries, uint32_t count,
                   struct bkv_index_totals *totals)
{
    *totals = (struct bkv_index_totals){.chunks = count};
    for (uint32_t i = 0; i < count; i++) {
        const struct node *node = node_at(index, entries[i]);
        totals->record_bytes += bytes_of(node);
        totals->payload_bytes += put_of(node)->payload_bytes;
        totals->extents += put_of(node)->extent_count;
    }
}

/* Fills in item `i` of the columns; its extents go to `pair`, which moves on. */
static void export_one(const struct node *node, struct bkv_index_columns *columns, uint64_t i, uint64_t *pair)
{
    const struct bkv_put *put = put_of(node);
    if (columns->layout_ids)
        columns->layout_ids[i] = put->layout_id;
    if (columns->record_bytes)
        columns->record_bytes[i] = bytes_of(node);
    if (columns->log_sequences)
        columns->log_sequences[i] = put->log_sequence;
    if (columns->payload_bytes)
        columns->payload_bytes[i] = put->payload_bytes;
    if (columns->digests)
        memcpy(columns->digests + i * BKV_DIGEST_BYTES, put->digest, BKV_DIGEST_BYTES);
    for (uint32_t e = 0; columns->extents && e < put->extent_count; e++) {
        struct bkv_units extent = bkv_put_extent(record_of(node), e);
        columns->extents[(*pair)++] = extent.start;
        columns->extents[(*pair)++] = extent.count;
    }
}

void bkv_index_take(struct bkv_index *index, const uint32_t *entries, uint32_t count,
                    struct bkv_index_columns *columns)
{
    uint64_t pair = 0;
    for (uint32_t i = 0; i < count; i++) {
        export_one(node_at(index, entries[i]), columns, i, &pair);
        bkv_index_remove(index, entries[i]);
        bkv_index_drop(index, entries[i]);
    }
}

void bkv_index_export(const struct bkv_index *index, struct bkv_index_columns *columns)
{
    uint64_t i = 0, pair = 0;
    for (uint32_t entry = index->oldest; entry; entry = node_at(index, entry)->newer, i++) {
        const struct node *node = node_at(index, entry);
        if (node->newer)
            __builtin_prefetch(node_at(index, node->newer));
        export_one(node, columns, i, &pair);
    }
}

/* Snapshots */

int bkv_index_snapshot_begin(struct bkv_index *index)
{
    if (index->snapshot.active)
        return -EBUSY;
    index->parity ^= PARITY; /* from here on every entry differs from it */
    index->snapshot = (struct snapshot){.active = true, .cursor = index->oldest};
    return 0;
}

/* The records that come next and their bytes, or NULL. */
static const uint8_t *snapshot_peek(struct bkv_index *index, uint32_t *bytes)
{
    struct snapshot *snapshot = &index->snapshot;
    while (snapshot->cursor) {
        const struct node *node = node_at(index, snapshot->cursor);
        if (node->newer)
            __builtin_prefetch(node_at(index, node->newer));
        if ((node->flags & PARITY) != index->parity) {
            *bytes = bytes_of(node);
            return record_of(node);
        }
        snapshot->cursor = node->newer;
    }
    if (snapshot->saved_done < snapshot->saved_bytes) {
        uint16_t record_bytes;
        memcpy(&record_bytes, snapshot->saved + snapshot->saved_done, sizeof record_bytes);
        *bytes = record_bytes;
        return snapshot->saved + snapshot->saved_done;
    }
    return NULL;
}

static void snapshot_advance(struct bkv_index *index, uint32_t bytes)
{
    struct snapshot *snapshot = &index->snapshot;
    if (snapshot->cursor) {
        struct node *node = node_at(index, snapshot->cursor);
        node->flags ^= PARITY;
        snapshot->cursor = node->newer;
    } else {
        snapshot->saved_done += bytes;
    }
}

/* Adds one record to the bodies. False: there is no room for it. */
static bool pack(uint32_t page_count, uint32_t *page, const uint8_t *record, uint32_t bytes, uint8_t *bodies,
                 uint16_t *body_bytes, uint16_t *record_counts)
{
    if (!*page || body_bytes[*page - 1] + bytes > BKV_PAGE_PAYLOAD_BYTES) {
        if (*page == page_count)
            return false;
        body_bytes[*page] = record_counts[*page] = 0;
        ++*page;
    }
    uint32_t at = *page - 1;
    memcpy(bodies + (uint64_t)at * BKV_PAGE_PAYLOAD_BYTES + body_bytes[at], record, bytes);
    body_bytes[at] = (uint16_t)(body_bytes[at] + bytes);
    record_counts[at]++;
    return true;
}

int bkv_index_snapshot_next(struct bkv_index *index, uint32_t page_count, uint8_t *bodies, uint16_t *body_bytes,
                            uint16_t *record_counts)
{
    uint32_t page = 0, bytes;
    const uint8_t *records;
    while ((records = snapshot_peek(index, &bytes))) {
        uint16_t first_bytes;
        memcpy(&first_bytes, records, sizeof first_bytes);
        uint32_t before = page;
        if (!pack(page_count, &page, records, first_bytes, bodies, body_bytes, record_counts))
            break;
        if (bytes > first_bytes
            && !pack(page_count, &page, records + first_bytes, bytes - first_bytes, bodies, body_bytes,
                     record_counts)) {
            /* both records of an entry or none: it may be removed before the next call */
            if (page == before) {
                body_bytes[page - 1] = (uint16_t)(body_bytes[page - 1] - first_bytes);
                record_counts[page - 1]--;
            } else {
                page = before;
            }
            break;
        }
        snapshot_advance(index, bytes);
    }
    return index->snapshot.failed ? -ENOMEM : (int)page;
}

void bkv_index_snapshot_end(struct bkv_index *index)
{
    uint32_t bytes;
    while (index->snapshot.cursor && snapshot_peek(index, &bytes) && index->snapshot.cursor)
        snapshot_advance(index, bytes);
    free(index->snapshot.saved);
    index->snapshot = (struct snapshot){0};
}

/* Batches */

void bkv_index_find_many(const struct bkv_index *index, const uint8_t *digests, uint32_t count, uint32_t *entries)
{
    for (uint32_t i = 0; i < count; i++)
        entries[i] = bkv_index_find(index, digests + (uint64_t)i * BKV_DIGEST_BYTES);
}

int64_t bkv_index_insert_many(struct bkv_index *index, const struct bkv_index_puts *puts, uint8_t *records,
                              uint64_t room_bytes, uint32_t *record_bytes)
{
    uint8_t encoded[BKV_RECORDS_BYTES];
    uint64_t used = 0;
    const uint8_t *key = puts->keys;
    int64_t code = 0;
    uint32_t added = 0;
    for (; added < puts->count && code >= 0; added++) {
        const struct bkv_transfer *transfer = &puts->transfers[puts->positions[added]];
        struct bkv_new_put put = {
            .log_sequence = puts->first_log_sequence + added,
            .payload_bytes = transfer->payload_bytes,
            .layout_id = puts->layout_ids[added],
            .key_bytes = puts->key_bytes[added],
            .key_is_text = puts->keys_are_text[added],
            .digest = puts->digests + (uint64_t)added * BKV_DIGEST_BYTES,
            .layout_checksum = puts->layout_checksums + (uint64_t)added * BKV_ROOT_BYTES,
            .key = key,
            .extents = puts->extents + transfer->first_extent,
            .extent_count = transfer->extent_count,
            .leaf_count = transfer->leaf_count,
            .leaves = puts->leaf_values + transfer->first_leaf,
            .base_bytes = puts->base_bytes,
        };
        key += put.key_bytes;
        record_bytes[added] = bkv_put_encode(&put, encoded);
        code = used + record_bytes[added] > room_bytes ? -ENOSPC
                                                      : bkv_index_insert(index, encoded, record_bytes[added]);
        if (code < 0)
            break;
        memcpy(records + used, encoded, record_bytes[added]);
        used += record_bytes[added];
    }
    if (code >= 0)
        return (int64_t)used;
    while (added--) {
        uint32_t entry = bkv_index_find(index, puts->digests + (uint64_t)added * BKV_DIGEST_BYTES);
        bkv_index_remove(index, entry);
        bkv_index_drop(index, entry);
    }
    return code;
}

uint32_t bkv_index_acquire(struct bkv_index *index, const uint8_t *digests, uint32_t count, uint32_t *columns,
                           uint64_t *payload_bytes)
{
    uint32_t *positions = columns, *entries = columns + count, *layout_ids = entries + count;
    uint32_t *extent_counts = layout_ids + count;
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++)
        __builtin_prefetch(&index->buckets[home_of(index, digests + (uint64_t)i * BKV_DIGEST_BYTES)]);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t entry = bkv_index_find(index, digests + (uint64_t)i * BKV_DIGEST_BYTES);
        if (!entry)
            continue;
        bkv_index_touch(index, entry);
        bkv_index_lease(index, entry);
        const struct bkv_put *put = put_of(node_at(index, entry));
        positions[found] = i;
        entries[found] = entry;
        layout_ids[found] = put->layout_id;
        extent_counts[found] = put->extent_count;
        payload_bytes[found++] = put->payload_bytes;
    }
    return found;
}

uint32_t bkv_index_release_many(struct bkv_index *index, uint32_t *entries, uint32_t count)
{
    uint32_t last = 0;
    for (uint32_t i = 0; i < count; i++)
        if (!bkv_index_release(index, entries[i]) && !bkv_index_holds(index, entries[i]))
            entries[last++] = entries[i];
    return last;
}

/* A transfer behind another, or the first. */
static struct bkv_transfer follow(const struct bkv_transfer *previous, uint64_t payload_bytes, uint32_t extent_count,
                                  uint32_t segment_count, uint64_t leaf_bytes)
{
    struct bkv_transfer transfer = {
        .payload_bytes = payload_bytes,
        .extent_count = extent_count,
        .segment_count = segment_count,
        .leaf_bytes = leaf_bytes,
        .leaf_count = leaf_bytes ? (uint32_t)((payload_bytes + leaf_bytes - 1) / leaf_bytes) : 0,
    };
    if (previous) {
        transfer.first_extent = previous->first_extent + previous->extent_count;
        transfer.first_segment = previous->first_segment + previous->segment_count;
        transfer.first_leaf = previous->first_leaf + previous->leaf_count;
    }
    return transfer;
}

uint64_t bkv_index_transfers(const struct bkv_index *index, const uint32_t *entries, uint32_t count,
                             uint64_t base_bytes, int hashed, const uint32_t *segment_counts,
                             struct bkv_transfer *transfers, struct bkv_extent *extents)
{
    const struct bkv_transfer *previous = NULL;
    for (uint32_t i = 0; i < count; previous = &transfers[i++]) {
        const struct node *node = node_at(index, entries[i]);
        const struct bkv_put *put = put_of(node);
        transfers[i] = follow(previous, put->payload_bytes, put->extent_count, segment_counts[i],
                              hashed ? bkv_leaf_bytes(put->payload_bytes) : 0);
        for (uint32_t e = 0; e < put->extent_count; e++) {
            struct bkv_units units = bkv_put_extent(record_of(node), e);
            extents[transfers[i].first_extent + e] = (struct bkv_extent){
                base_bytes + units.start * BKV_UNIT_BYTES, units.count * BKV_UNIT_BYTES};
        }
    }
    return previous ? previous->first_leaf + (uint64_t)previous->leaf_count : 0;
}

uint64_t bkv_put_transfers(const uint64_t *payload_bytes, const uint32_t *extent_counts, const uint32_t *segment_counts,
                           uint32_t count, uint64_t base_bytes, struct bkv_extent *extents,
                           struct bkv_transfer *transfers)
{
    const struct bkv_transfer *previous = NULL;
    for (uint32_t i = 0; i < count; previous = &transfers[i++]) {
        transfers[i] = follow(previous, payload_bytes[i], extent_counts[i], segment_counts[i],
                              bkv_leaf_bytes(payload_bytes[i]));
        for (uint32_t e = 0; e < extent_counts[i]; e++) {
            struct bkv_extent *extent = &extents[transfers[i].first_extent + e];
            *extent = (struct bkv_extent){base_bytes + extent->offset_bytes * BKV_UNIT_BYTES,
                                          extent->length_bytes * BKV_UNIT_BYTES};
        }
    }
    return previous ? previous->first_leaf + (uint64_t)previous->leaf_count : 0;
}

uint32_t bkv_index_verify(const struct bkv_index *index, const uint32_t *entries, uint32_t count,
                          const struct bkv_transfer *transfers, const uint64_t *leaf_values,
                          const uint8_t *layout_checksums, uint8_t *exact)
{
    uint8_t root[BKV_ROOT_BYTES];
    uint32_t inexact = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct bkv_put *put = put_of(node_at(index, entries[i]));
        bkv_root_checksum(put->digest, put->payload_bytes, layout_checksums + (uint64_t)i * BKV_ROOT_BYTES,
                          leaf_values + transfers[i].first_leaf, transfers[i].leaf_count, root);
        exact[i] = !transfers[i].result && !memcmp(root, put->root, sizeof root);
        inexact += !exact[i];
    }
    return inexact;
}
