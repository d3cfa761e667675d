/* Exercises the engine without Python, for the sanitizers and valgrind: driver IMAGE SEED ROUNDS
 *
 * Several threads write and read random batches in their own part of the image and compare every byte with a copy in
 * memory; garbage is submitted; operations fail; the engine is closed with work in flight. Of the passthrough, which
 * needs a namespace: what it would send, and what it makes of the answers. Exits 0 when all of it held.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "batch.h"
#include "checksum.h"
#include "engine.h"
#include "passthrough.h"
#include "plan.h"

enum {
    UNIT = BKV_UNIT_BYTES,
    THREADS = 3,
    PART_BYTES = 4 << 20,
    ARENA_BYTES = 6 << 20,
    IMAGE_BYTES = THREADS * PART_BYTES,
    MAX_TRANSFERS = 8,
    MAX_PIECES = 16,
    GUARD_BYTES = 32,
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

struct plan {
    struct bkv_transfer transfers[MAX_TRANSFERS];
    struct bkv_extent extents[MAX_TRANSFERS * MAX_PIECES];
    struct bkv_segment segments[MAX_TRANSFERS * MAX_PIECES];
    uint64_t leaves[4096];
    uint32_t transfer_count, extent_count, segment_count, leaf_count;
};

/* Random transfers within [base, base + PART_BYTES) and the arena; extents and segments of a batch do not overlap. */
static void make_plan(struct plan *plan, uint64_t *random, uint64_t base, uint8_t *arena)
{
    static const uint64_t sizes[] = {1, 511, 4096, 5000, 16384, 70001, 300000};
    uint64_t unit = 0, at = 0;
    memset(plan, 0, sizeof *plan);
    uint32_t wanted = 1 + (uint32_t)below(random, MAX_TRANSFERS);
    while (plan->transfer_count < wanted) {
        uint64_t payload = sizes[below(random, sizeof sizes / sizeof *sizes)];
        uint64_t units = (payload + UNIT - 1) / UNIT;
        struct bkv_transfer *transfer = &plan->transfers[plan->transfer_count++];
        *transfer = (struct bkv_transfer){
            .payload_bytes = payload,
            .first_extent = plan->extent_count,
            .first_segment = plan->segment_count,
            .first_leaf = plan->leaf_count,
            .leaf_bytes = below(random, 3) ? 1000 + below(random, 200000) : 0,
        };
        for (uint64_t left = units, i = 0; left; i++) {
            uint64_t n = i == MAX_PIECES - 1 ? left : 1 + below(random, left);
            plan->extents[plan->extent_count++] = (struct bkv_extent){base + unit * UNIT, n * UNIT};
            transfer->extent_count++;
            unit += n + (below(random, 3) == 0);
            left -= n;
        }
        for (uint64_t left = payload, i = 0; left; i++) {
            uint64_t n = i == MAX_PIECES - 1 ? left : 1 + below(random, left);
            if (below(random, 2))
                at = (at + UNIT - 1) / UNIT * UNIT;
            plan->segments[plan->segment_count++] = (struct bkv_segment){(uintptr_t)arena + at, n};
            transfer->segment_count++;
            at += n + below(random, GUARD_BYTES);
            left -= n;
        }
        if (transfer->leaf_bytes)
            transfer->leaf_count = (uint32_t)((payload + transfer->leaf_bytes - 1) / transfer->leaf_bytes);
        plan->leaf_count += transfer->leaf_count;
        CHECK(unit * UNIT <= PART_BYTES && at <= ARENA_BYTES);
    }
}

static struct bkv_request request_for(struct plan *plan, enum bkv_direction direction, uint64_t token,
                                      uint32_t priority)
{
    return (struct bkv_request){
        .transfers = plan->transfers,
        .extents = plan->extents,
        .segments = plan->segments,
        .leaf_values = plan->leaves,
        .transfer_count = plan->transfer_count,
        .extent_count = plan->extent_count,
        .segment_count = plan->segment_count,
        .leaf_count = plan->leaf_count,
        .token = token,
        .direction = direction,
        .priority = priority,
    };
}

static struct bkv_engine *open_engine(int fd, uint32_t backend, uint32_t lba, uint64_t size)
{
    struct bkv_options options = {
        .fd = fd,
        .lifeline_fd = -1,
        .backend = backend,
        .size_bytes = size,
        .lba_bytes = lba,
        .memory_alignment_bytes = 512,
        .max_transfer_bytes = 128 << 10,
        .max_segments = 20,
        .depth = 8,
        .workers = 2,
        .staging_bytes = 1 << 20,
    };
    struct bkv_failure failure;
    struct bkv_engine *engine = bkv_engine_open(&options, &failure);
    if (!engine)
        fprintf(stderr, "open: %s: %d\n", failure.message, failure.code);
    CHECK(engine);
    return engine;
}

/* The transfer's payload in one piece, gathered from its segments, or scattered to them. */
static void gather(const struct plan *plan, const struct bkv_transfer *transfer, uint8_t *payload)
{
    for (uint32_t i = 0; i < transfer->segment_count; i++) {
        struct bkv_segment segment = plan->segments[transfer->first_segment + i];
        memcpy(payload, (const void *)(uintptr_t)segment.address, segment.length_bytes);
        payload += segment.length_bytes;
    }
}

struct caller {
    struct bkv_engine *engine;
    pthread_t thread;
    uint64_t random, base;
    int rounds;
};

static uint8_t *map(uint64_t length)
{
    uint8_t *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void run_batch(struct bkv_engine *engine, struct plan *plan, enum bkv_direction direction, uint32_t priority,
                      bool on_caller)
{
    struct bkv_request request = request_for(plan, direction, 0, priority);
    request.on_caller = on_caller;
    struct bkv_failure failure;
    struct bkv_batch *batch;
    CHECK(bkv_engine_submit(engine, &request, &batch, &failure) == 0);
    bkv_engine_wait(engine, &batch);
}

static void *call(void *argument)
{
    struct caller *caller = argument;
    uint8_t *arena = map(ARENA_BYTES), *before = map(ARENA_BYTES), *image = map(PART_BYTES);
    uint8_t *payload = malloc(1 << 20), *expected = malloc(1 << 20);
    struct plan *plan = malloc(sizeof *plan);
    CHECK(payload && expected && plan);
    int handle = bkv_engine_register(caller->engine, (uintptr_t)arena, ARENA_BYTES / 2);
    for (int round = 0; round < caller->rounds; round++) {
        bool write = below(&caller->random, 2);
        make_plan(plan, &caller->random, caller->base, arena);
        for (uint64_t i = 0; i < ARENA_BYTES; i += 8) {
            uint64_t value = next_random(&caller->random);
            memcpy(arena + i, &value, 8);
        }
        memcpy(before, arena, ARENA_BYTES);
        run_batch(caller->engine, plan, write ? BKV_WRITE : BKV_READ, (uint32_t)below(&caller->random, 3),
                  below(&caller->random, 2));
        for (uint32_t t = 0; t < plan->transfer_count; t++) {
            const struct bkv_transfer *transfer = &plan->transfers[t];
            CHECK(transfer->result == 0);
            gather(plan, transfer, payload);
            uint8_t *at = expected;
            if (write) {
                memset(expected, 0, 1 << 20);
                memcpy(expected, payload, transfer->payload_bytes);
            }
            for (uint32_t i = 0; i < transfer->extent_count; i++) {
                struct bkv_extent extent = plan->extents[transfer->first_extent + i];
                uint8_t *stored = image + (extent.offset_bytes - caller->base);
                memcpy(write ? stored : at, write ? at : stored, extent.length_bytes);
                at += extent.length_bytes;
            }
            CHECK(!memcmp(payload, expected, transfer->payload_bytes));
            for (uint64_t leaf = 0; leaf < transfer->leaf_count; leaf++) {
                uint64_t from = leaf * transfer->leaf_bytes, left = transfer->payload_bytes - from;
                uint64_t n = left < transfer->leaf_bytes ? left : transfer->leaf_bytes;
                CHECK(plan->leaves[transfer->first_leaf + leaf] == bkv_checksum(payload + from, n));
            }
            /* what is no segment must not change: put back what was there, then all of the arena is as before */
            for (uint32_t i = 0; i < transfer->segment_count; i++) {
                struct bkv_segment segment = plan->segments[transfer->first_segment + i];
                uint8_t *memory = (uint8_t *)(uintptr_t)segment.address;
                memcpy(memory, before + (memory - arena), segment.length_bytes);
            }
        }
        CHECK(!memcmp(arena, before, ARENA_BYTES));
    }
    if (handle >= 0)
        CHECK(bkv_engine_unregister(caller->engine, handle) == 0);
    munmap(arena, ARENA_BYTES);
    munmap(before, ARENA_BYTES);
    munmap(image, PART_BYTES);
    free(payload);
    free(expected);
    free(plan);
    return NULL;
}

/* All but the first unit is encrypted, and holds zeros. */
static void begin_encryption(struct bkv_engine *engine)
{
    uint8_t key[BKV_CIPHER_KEY_BYTES];
    struct bkv_failure failure;
    for (uint32_t i = 0; i < sizeof key; i++)
        key[i] = (uint8_t)(3 * i + 1);
    CHECK(bkv_engine_encrypt(engine, key, UNIT / 2, IMAGE_BYTES, &failure) == -EINVAL);
    for (int i = 0; i < 2; i++)
        CHECK(bkv_engine_encrypt(engine, key, UNIT, IMAGE_BYTES, &failure) == 0);
    uint8_t *zeros = map(IMAGE_BYTES);
    struct bkv_transfer transfer = {.payload_bytes = IMAGE_BYTES, .extent_count = 1, .segment_count = 1};
    struct bkv_extent extent = {0, IMAGE_BYTES};
    struct bkv_segment segment = {(uintptr_t)zeros, IMAGE_BYTES};
    struct bkv_request request = {
        .transfers = &transfer, .extents = &extent, .segments = &segment,
        .transfer_count = 1, .extent_count = 1, .segment_count = 1, .direction = BKV_WRITE,
    };
    struct bkv_batch *batch;
    CHECK(bkv_engine_submit(engine, &request, &batch, &failure) == 0);
    bkv_engine_wait(engine, &batch);
    CHECK(transfer.result == 0);
    munmap(zeros, IMAGE_BYTES);
}

static void threads_agree_with_memory(int fd, uint32_t backend, uint32_t lba, bool encrypted, uint64_t seed,
                                      int rounds)
{
    CHECK(ftruncate(fd, 0) == 0 && ftruncate(fd, IMAGE_BYTES) == 0);
    struct bkv_engine *engine = open_engine(fd, backend, lba, IMAGE_BYTES);
    if (encrypted)
        begin_encryption(engine);
    struct caller callers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        callers[i] = (struct caller){
            .engine = engine,
            .random = seed + 977 * (uint64_t)(i + 1),
            .base = (uint64_t)i * PART_BYTES,
            .rounds = rounds,
        };
        CHECK(!pthread_create(&callers[i].thread, NULL, call, &callers[i]));
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(callers[i].thread, NULL);
    CHECK(bkv_engine_flush(engine) == 0);
    CHECK(bkv_engine_discard(engine, 0, UNIT) == 0);
    struct bkv_counters counters;
    bkv_engine_counters(engine, &counters);
    CHECK(counters.bounced_bytes && counters.hashed_bytes && counters.coalesced_requests);
    CHECK(!counters.direct_bytes == encrypted);
    bkv_engine_free(engine);
}

/* Whatever a request says, the answer is an errno: no crash, nothing started. */
static void garbage_is_refused(int fd, uint32_t backend, uint64_t seed, int rounds)
{
    struct bkv_engine *engine = open_engine(fd, backend, 512, IMAGE_BYTES);
    uint8_t *arena = map(ARENA_BYTES);
    struct plan *plan = malloc(sizeof *plan);
    CHECK(plan);
    for (int round = 0; round < rounds; round++) {
        make_plan(plan, &seed, 0, arena);
        struct bkv_request request = request_for(plan, BKV_READ, 0, BKV_LOAD);
        struct bkv_transfer *transfer = &plan->transfers[below(&seed, plan->transfer_count)];
        uint64_t value = below(&seed, 2) ? next_random(&seed) | 1u << 31 : UINT64_MAX - below(&seed, 5000);
        switch (below(&seed, 10)) {
        case 0: transfer->payload_bytes = value; break;
        case 1: transfer->first_extent = (uint32_t)value; break;
        case 2: transfer->extent_count = (uint32_t)value; break;
        case 3: transfer->first_segment = (uint32_t)value; break;
        case 4: transfer->segment_count = (uint32_t)value; break;
        case 5: transfer->leaf_count = (uint32_t)value; break;
        case 6: plan->extents[transfer->first_extent].offset_bytes = value; break;
        case 7: plan->extents[transfer->first_extent].length_bytes = value; break;
        case 8: plan->segments[transfer->first_segment].length_bytes = value; break;
        case 9: transfer->flags = (uint32_t)value; break;
        }
        struct bkv_batch *batch;
        struct bkv_failure failure;
        CHECK(bkv_engine_submit(engine, &request, &batch, &failure) == -EINVAL);
        CHECK(failure.message[0]);
    }
    struct bkv_counters counters;
    bkv_engine_counters(engine, &counters);
    CHECK(counters.device_requests == 0);
    free(plan);
    munmap(arena, ARENA_BYTES);
    bkv_engine_free(engine);
}

/* Neighbours that went out as one request: only those past the end of the shortened image fail. */
static void errors_stay_with_their_transfer(int fd, uint32_t backend, bool staged, bool on_caller)
{
    enum { COUNT = 16, GOOD = 11 };
    CHECK(ftruncate(fd, GOOD * UNIT) == 0);
    struct bkv_engine *engine = open_engine(fd, backend, 512, IMAGE_BYTES);
    uint8_t *memory = map(2 * COUNT * UNIT);
    memset(memory, 0xaa, 2 * COUNT * UNIT);
    struct plan *plan = calloc(1, sizeof *plan);
    CHECK(plan);
    for (uint32_t i = 0; i < COUNT / 2; i++) {
        /* two pairs of neighbours share one request with everything else */
        for (uint32_t j = 2 * i; j < 2 * i + 2; j++)
            plan->extents[j] = (struct bkv_extent){(uint64_t)j * UNIT, UNIT};
        plan->segments[i] = (struct bkv_segment){(uintptr_t)memory + 2 * i * UNIT + (staged ? 3 : 0), 2 * UNIT};
        plan->transfers[i] = (struct bkv_transfer){
            .payload_bytes = 2 * UNIT,
            .first_extent = 2 * i,
            .extent_count = 2,
            .first_segment = i,
            .segment_count = 1,
            .first_leaf = 2 * i,
            .leaf_count = 2,
            .leaf_bytes = UNIT,
        };
    }
    plan->transfer_count = COUNT / 2;
    plan->extent_count = plan->leaf_count = COUNT;
    plan->segment_count = COUNT / 2;
    run_batch(engine, plan, BKV_READ, BKV_LOAD, on_caller);
    for (uint32_t i = 0; i < COUNT / 2; i++)
        CHECK(plan->transfers[i].result == (2 * i + 2 <= GOOD ? 0 : -ENODEV));
    struct bkv_counters counters;
    bkv_engine_counters(engine, &counters);
    CHECK(counters.short_transfers && counters.resubmitted && counters.isolated_requests == COUNT / 2);
    free(plan);
    munmap(memory, 2 * COUNT * UNIT);
    bkv_engine_free(engine);
}

static void *drain(void *argument)
{
    uint64_t *sum = calloc(1, sizeof *sum), token;
    CHECK(sum);
    while ((token = bkv_engine_next(argument)))
        *sum += token;
    return sum;
}

/* Every token comes out exactly once, also when the engine is closed before any was asked for. */
static void closing_waits_for_batches(int fd, uint32_t backend)
{
    enum { BATCHES = 24 };
    CHECK(ftruncate(fd, IMAGE_BYTES) == 0);
    struct bkv_engine *engine = open_engine(fd, backend, 512, IMAGE_BYTES);
    uint8_t *memory = map(BATCHES * UNIT);
    struct bkv_transfer transfers[BATCHES];
    pthread_t drainer;
    uint64_t expected = 0;
    for (uint32_t i = 0; i < BATCHES; i++) {
        struct bkv_extent extent = {(uint64_t)i * UNIT, UNIT};
        struct bkv_segment segment = {(uintptr_t)memory + i * UNIT + i % 2, UNIT - i % 2};
        transfers[i] = (struct bkv_transfer){
            .payload_bytes = UNIT - i % 2, .extent_count = 1, .segment_count = 1};
        struct bkv_request request = {
            .transfers = &transfers[i],
            .extents = &extent,
            .segments = &segment,
            .transfer_count = 1,
            .extent_count = 1,
            .segment_count = 1,
            .token = i + 1,
            .direction = i % 3 ? BKV_WRITE : BKV_READ,
            .priority = i % BKV_PRIORITY_COUNT,
        };
        struct bkv_batch *batch;
        struct bkv_failure failure;
        CHECK(bkv_engine_submit(engine, &request, &batch, &failure) == 0);
        expected += i + 1;
        if (i == BATCHES / 2)
            CHECK(!pthread_create(&drainer, NULL, drain, engine));
    }
    bkv_engine_close(engine);
    bkv_engine_close(engine);
    for (uint32_t i = 0; i < BATCHES; i++)
        CHECK(transfers[i].result == 0);
    uint64_t *sum;
    pthread_join(drainer, (void **)&sum);
    CHECK(*sum == expected);
    free(sum);
    CHECK(bkv_engine_flush(engine) == -ESHUTDOWN);
    CHECK(bkv_engine_register(engine, (uintptr_t)memory, UNIT) == -ESHUTDOWN);
    munmap(memory, BATCHES * UNIT);
    bkv_engine_free(engine);
}

/* Plans random batches and looks at the memory of every request. Returns how many gaps there are inside requests. */
static uint32_t plan_requests(uint32_t boundary, bool stage_all, uint64_t seed, int rounds)
{
    enum { REQUEST_BYTES = 128 << 10, SEGMENTS = 20 };
    struct bkv_options options = {
        .size_bytes = IMAGE_BYTES,
        .lba_bytes = 512,
        .memory_alignment_bytes = 4,
        .max_segments = SEGMENTS,
        .memory_boundary_bytes = boundary,
    };
    struct bkv_regions regions;
    bkv_regions_open(&regions);
    uint8_t *arena = map(ARENA_BYTES), *staging = map(2 * REQUEST_BYTES);
    struct plan *plan = malloc(sizeof *plan);
    CHECK(plan);
    uint32_t gaps = 0;
    for (int round = 0; round < rounds; round++) {
        make_plan(plan, &seed, 0, arena);
        struct bkv_request request = request_for(plan, round % 2 ? BKV_WRITE : BKV_READ, 0, BKV_LOAD);
        struct bkv_batch *batch;
        struct bkv_failure failure;
        struct bkv_plan_totals totals = {0};
        uint64_t planned = 0, described = 0;
        CHECK(bkv_batch_open(&batch, &request, &options, &failure) == 0);
        CHECK(bkv_plan(batch, &options, REQUEST_BYTES, stage_all, &regions, &totals) == 0);
        for (uint32_t i = 0; i < plan->extent_count; i++)
            described += plan->extents[i].length_bytes;
        for (uint32_t i = 0; i < batch->operation_count; i++) {
            struct bkv_operation *operation = &batch->operations[i];
            bkv_operation_attach_staging(operation, staging);
            uint64_t length = 0, pages = 0, end = 0;
            for (uint32_t j = 0; j < operation->iov_count; j++) {
                uint64_t start = (uintptr_t)operation->iovs[j].iov_base;
                gaps += j && (start | end) % UNIT != 0;
                end = start + operation->iovs[j].iov_len;
                length += operation->iovs[j].iov_len;
                pages += (end + UNIT - 1) / UNIT - start / UNIT;
                CHECK(start % 4 == 0 && operation->iovs[j].iov_len % 512 == 0);
            }
            CHECK(length == operation->length_bytes && length && length <= REQUEST_BYTES);
            CHECK(pages <= SEGMENTS);
            if (stage_all) {
                CHECK(operation->iov_count == 1 && operation->staging_bytes == length);
                CHECK(operation->offset_bytes % UNIT == 0 && length % UNIT == 0);
                for (uint32_t j = 0; j < operation->part_count; j++)
                    CHECK(operation->parts[j].start_bytes % UNIT == 0 && operation->parts[j].length_bytes % UNIT == 0);
            }
            CHECK(operation->staging_bytes <= 2 * REQUEST_BYTES);
            planned += length;
        }
        CHECK(planned == described);
        bkv_batch_free(batch);
    }
    free(plan);
    munmap(arena, ARENA_BYTES);
    munmap(staging, 2 * REQUEST_BYTES);
    bkv_regions_close(&regions);
    return gaps;
}

static void commands_say_what_their_operation_does(void)
{
    struct {
        struct io_uring_sqe sqe;
        uint8_t wide[sizeof(struct io_uring_sqe)];
    } entry;
    const struct nvme_uring_cmd *command = (const struct nvme_uring_cmd *)entry.sqe.cmd;
    struct bkv_options options = {.lba_bytes = 4096, .nsid = 7};
    struct bkv_batch batch = {.direction = BKV_WRITE};
    struct bkv_operation operation = {
        .batch = &batch, .offset_bytes = (5ull << 44) + 3 * 4096, .length_bytes = 128 << 10, .fixed_index = 9};
    struct iovec memory[2] = {{(void *)(uintptr_t)0x10000, 64 << 10}, {(void *)(uintptr_t)0x90000, 64 << 10}};

    memset(&entry, 0, sizeof entry);
    bkv_passthrough_prepare(&entry.sqe, &options, &operation, memory, 2, false);
    CHECK(entry.sqe.opcode == IORING_OP_URING_CMD && entry.sqe.cmd_op == NVME_URING_CMD_IO_VEC);
    CHECK(command->opcode == 1 && command->nsid == 7);
    CHECK(command->cdw10 == 3 && command->cdw11 == 5 && command->cdw12 == 31);
    CHECK(command->addr == (uintptr_t)memory && command->data_len == 2);
    CHECK(entry.sqe.uring_cmd_flags == 0);
    CHECK(command->cdw13 == 0);

    options.is_placed = true;
    memcpy(options.placement_identifiers, (uint16_t[]){0, 1, 0x8002, 3}, sizeof options.placement_identifiers);
    for (int placement = 0; placement < BKV_PLACEMENT_COUNT; placement++) {
        batch.placement = placement;
        memset(&entry, 0, sizeof entry);
        bkv_passthrough_prepare(&entry.sqe, &options, &operation, memory, 2, false);
        CHECK(command->cdw12 == (2u << 20 | 31));
        CHECK(command->cdw13 == (uint32_t)options.placement_identifiers[placement] << 16);
    }

    batch.direction = BKV_READ;
    memory[0].iov_len = operation.length_bytes;
    options.lba_bytes = 512;
    for (int fixed = 0; fixed < 2; fixed++) {
        memset(&entry, 0, sizeof entry);
        bkv_passthrough_prepare(&entry.sqe, &options, &operation, memory, 1, fixed);
        CHECK(entry.sqe.cmd_op == NVME_URING_CMD_IO && command->opcode == 2);
        CHECK(command->cdw10 == 24 && command->cdw11 == 40 && command->cdw12 == 255 && command->cdw13 == 0);
        CHECK(command->addr == 0x10000 && command->data_len == 128 << 10);
        CHECK(entry.sqe.uring_cmd_flags == (fixed ? IORING_URING_CMD_FIXED : 0u));
        CHECK(entry.sqe.buf_index == (fixed ? 9 : 0));
    }
}

static void answers_are_those_of_the_driver(int fd)
{
    static const struct {
        uint32_t status;
        int code;
    } known[] = {
        {0x000, 0},       {0x001, EOPNOTSUPP}, {0x002, EOPNOTSUPP}, {0x004, EIO},     {0x00b, ENODEV},
        {0x080, EREMOTEIO}, {0x081, ENOSPC},   {0x082, EREMOTEIO},  {0x083, EBADE},   {0x182, ENODATA},
        {0x280, ENODATA}, {0x281, ENODATA},    {0x282, EILSEQ},     {0x284, EILSEQ},  {0x287, ENODATA},
        {0x370, ENOLINK}, {0x371, EIO},        {0x7c0, EIO},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        CHECK(bkv_nvme_errno(known[i].status) == -known[i].code);
        CHECK(bkv_nvme_errno(known[i].status | 0x7800) == -known[i].code); /* more, retry delay, do not retry */
    }
    CHECK(ftruncate(fd, UNIT) == 0);
    struct bkv_options options = {.fd = fd};
    struct bkv_operation operation = {.length_bytes = 8192, .fixed_index = -1};
    bool fixed_refused = false;
    CHECK(bkv_passthrough_answer(&options, &operation, 0, &fixed_refused) == 8192);
    CHECK(bkv_passthrough_answer(&options, &operation, 0x4281, &fixed_refused) == -ENODATA);
    CHECK(bkv_passthrough_answer(&options, &operation, -ENODEV, &fixed_refused) == -ENODEV);
    for (; operation.attempts < 5; operation.attempts++)
        CHECK(bkv_passthrough_answer(&options, &operation, 0x281, &fixed_refused) == -EAGAIN);
    CHECK(bkv_passthrough_answer(&options, &operation, 0x281, &fixed_refused) == -ENODATA);
    CHECK(!fixed_refused);
    operation.fixed_index = 3;
    CHECK(bkv_passthrough_answer(&options, &operation, -EINVAL, &fixed_refused) == -EAGAIN);
    CHECK(fixed_refused && operation.fixed_index == -1);
    CHECK(bkv_passthrough_answer(&options, &operation, -EINVAL, &fixed_refused) == -EINVAL);
    CHECK(ftruncate(fd, 0) == 0); /* the namespace went away */
    CHECK(bkv_passthrough_answer(&options, &operation, -EINVAL, &fixed_refused) == -ENODEV);
    CHECK(bkv_passthrough_answer(&options, &operation, 0x4002, &fixed_refused) == -ENODEV);
    CHECK(bkv_passthrough_answer(&options, &operation, 0, &fixed_refused) == 8192);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    uint64_t seed = strtoull(argv[2], NULL, 0) * 2 + 1;
    int rounds = atoi(argv[3]);
    int fd = open(argv[1], O_RDWR | O_CREAT | O_DIRECT, 0600);
    CHECK(fd >= 0);
    for (uint32_t backend = BKV_BACKEND_IO_URING; backend <= BKV_BACKEND_THREADS; backend++) {
        for (int encrypted = 0; encrypted < 2; encrypted++) {
            threads_agree_with_memory(fd, backend, backend ? 512 : 4096, encrypted, seed, rounds);
            threads_agree_with_memory(fd, backend, backend ? 4096 : 512, encrypted, seed + 1, rounds);
        }
        garbage_is_refused(fd, backend, seed, 20 * rounds);
        for (int i = 0; i < 4; i++)
            errors_stay_with_their_transfer(fd, backend, i % 2, i / 2);
        closing_waits_for_batches(fd, backend);
    }
    CHECK(plan_requests(0, false, seed, rounds) > 0);
    CHECK(plan_requests(UNIT, false, seed, rounds) == 0);
    CHECK(plan_requests(0, true, seed, rounds) == 0);
    commands_say_what_their_operation_does();
    answers_are_those_of_the_driver(fd);
    close(fd);
    return 0;
}
