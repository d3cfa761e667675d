/* Exercises the index without Python, for the sanitizers and valgrind: index_driver SEED ROUNDS
 *
 * Random changes against an array that says what there should be, while a snapshot is read and leases come and go;
 * page bodies of noise and of damaged records. Exits 0 when all of it held.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "index.h"

enum {
    KEYS = 700,
    STEPS = 6000,
    DATA_UNITS = 1 << 20,
};

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            abort();                                                                    \
        }                                                                               \
    } while (0)

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static uint64_t below(uint64_t *state, uint64_t limit)
{
    return next_random(state) % limit;
}

static void digest_of(uint32_t key, uint8_t *digest)
{
    memset(digest, 0x5a, BKV_DIGEST_BYTES);
    memcpy(digest, &key, sizeof key);
}

/* Records of a chunk, with a key of some length: a KEY_TAIL record behind it where that is long. */
static uint32_t encode(uint64_t *random, uint32_t key, uint64_t sequence, uint8_t *records)
{
    uint8_t digest[BKV_DIGEST_BYTES], layout[16] = {0}, name[BKV_MAX_KEY_BYTES] = {1};
    uint64_t leaves[BKV_MAX_LEAVES] = {7};
    digest_of(key, digest);
    uint64_t payload_bytes = 1 + below(random, 3 << 20), leaf_bytes = bkv_leaf_bytes(payload_bytes);
    uint64_t units = (payload_bytes + BKV_UNIT_BYTES - 1) / BKV_UNIT_BYTES, first = units / 2;
    struct bkv_extent extents[2] = {{(uint64_t)key * BKV_UNIT_BYTES, first * BKV_UNIT_BYTES},
                                    {(DATA_UNITS / 2 + key) * (uint64_t)BKV_UNIT_BYTES,
                                     (units - first) * BKV_UNIT_BYTES}};
    struct bkv_new_put put = {
        .log_sequence = sequence,
        .payload_bytes = payload_bytes,
        .layout_id = key % 5,
        .key_bytes = below(random, 20) ? 1 + (uint32_t)below(random, 60) : BKV_MAX_KEY_BYTES,
        .digest = digest,
        .layout_checksum = layout,
        .key = name,
        .extents = first ? extents : extents + 1,
        .extent_count = first ? 2 : 1,
        .leaf_count = (uint32_t)((payload_bytes + leaf_bytes - 1) / leaf_bytes),
        .leaves = leaves,
    };
    return bkv_put_encode(&put, records);
}

/* Reads some bodies of a snapshot. Returns the records in them. */
static uint64_t read_snapshot(struct bkv_index *index, uint32_t pages)
{
    uint8_t *bodies = malloc((uint64_t)pages * BKV_PAGE_PAYLOAD_BYTES);
    uint16_t bytes[8], counts[8];
    CHECK(bodies && pages <= 8);
    int made = bkv_index_snapshot_next(index, pages, bodies, bytes, counts);
    CHECK(made >= 0);
    uint64_t records = 0;
    for (int page = 0; page < made; page++) {
        CHECK(bytes[page] <= BKV_PAGE_PAYLOAD_BYTES);
        records += counts[page];
    }
    free(bodies);
    return records;
}

static void changes_agree(uint64_t random)
{
    struct bkv_index *index = bkv_index_new(random);
    CHECK(index);
    uint32_t places[KEYS] = {0};
    uint64_t present = 0, promised = 0, seen = 0;
    int reading = 0;
    uint8_t records[BKV_RECORDS_BYTES], digest[BKV_DIGEST_BYTES];
    for (uint64_t step = 1; step <= STEPS; step++) {
        uint32_t key = (uint32_t)below(&random, KEYS);
        digest_of(key, digest);
        CHECK(bkv_index_find(index, digest) == places[key]);
        switch (below(&random, 8)) {
        case 0:
        case 1:
        case 2: {
            uint32_t bytes = encode(&random, key, step, records);
            int64_t place = bkv_index_insert(index, records, bytes);
            CHECK(places[key] ? place == -EEXIST : place > 0);
            if (!places[key]) {
                places[key] = (uint32_t)place;
                present++;
            }
            break;
        }
        case 3:
        case 4:
            if (places[key]) {
                int leased = below(&random, 2) != 0;
                if (leased)
                    bkv_index_lease(index, places[key]);
                bkv_index_remove(index, places[key]);
                if (leased) {
                    CHECK(!bkv_index_holds(index, places[key]));
                    CHECK(bkv_index_release(index, places[key]) == 0);
                }
                bkv_index_drop(index, places[key]);
                places[key] = 0;
                present--;
            }
            break;
        case 5:
            if (places[key])
                bkv_index_touch(index, places[key]);
            break;
        case 6:
            if (!reading) {
                CHECK(!bkv_index_snapshot_begin(index));
                CHECK(bkv_index_snapshot_begin(index) == -EBUSY);
                promised = seen = 0;
                for (uint32_t entry = bkv_index_next(index, 0); entry; entry = bkv_index_next(index, entry)) {
                    uint32_t bytes;
                    const struct bkv_put *put = (const void *)bkv_index_records(index, entry, &bytes);
                    promised += bytes > put->record_bytes ? 2 : 1;
                }
                reading = 1;
            }
            break;
        default:
            if (reading) {
                uint64_t records_read = read_snapshot(index, 2 + (uint32_t)below(&random, 6));
                seen += records_read;
                if (!records_read || !below(&random, 40)) {
                    CHECK(records_read || seen == promised);
                    bkv_index_snapshot_end(index);
                    reading = 0;
                }
            }
        }
        struct bkv_index_totals totals;
        bkv_index_totals(index, &totals);
        CHECK(totals.chunks == present);
    }
    uint64_t listed = 0;
    for (uint32_t entry = bkv_index_next_idle(index, 0); entry; entry = bkv_index_next_idle(index, entry))
        listed++;
    CHECK(listed == present);
    bkv_index_free(index);
}

static void pages_of_anything(uint64_t random)
{
    struct bkv_index *index = bkv_index_new(random);
    CHECK(index);
    for (int round = 0; round < 400; round++) {
        uint8_t body[BKV_PAGE_PAYLOAD_BYTES], records[BKV_RECORDS_BYTES];
        uint32_t bytes = 0, count = 0;
        for (;;) {
            uint32_t more = encode(&random, (uint32_t)below(&random, KEYS), 1 + (uint64_t)round, records);
            if (bytes + more > sizeof body)
                break;
            memcpy(body + bytes, records, more);
            bytes += more;
            count++;
        }
        uint64_t damage = below(&random, 4);
        for (uint64_t i = 0; i < damage; i++)
            body[below(&random, bytes + !bytes)] = (uint8_t)next_random(&random);
        /* on the heap and exactly as long, so that reading past it is noticed */
        uint8_t *exact = malloc(bytes + !bytes);
        CHECK(exact);
        memcpy(exact, body, bytes);
        int code = bkv_index_load(index, exact, bytes, count + (uint32_t)below(&random, 2), DATA_UNITS);
        CHECK(code == 0 || code == -EINVAL);
        free(exact);
    }
    bkv_index_free(index);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    uint64_t seed = strtoull(argv[1], NULL, 0) * 2 + 1;
    for (int round = 0; round < atoi(argv[2]); round++) {
        changes_agree(seed + (uint64_t)round * 1000);
        pages_of_anything(seed + (uint64_t)round * 1000);
    }
    return 0;
}
