#include "lane.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum {
    LANE_BYTES = 8 << 20, /* of a batch; with more, the reactor and the workers gain by working side by side */
    LANE_DEPTH = 32,
};

/* What a thread does on the lane. */
struct run {
    struct bkv_engine *engine;
    struct bkv_lane *lane;
    struct bkv_batch *batch;
    struct bkv_operation_list again; /* to be issued once more */
    uint32_t in_flight;
};

void bkv_lane_open(struct bkv_lane *lane)
{
    pthread_mutex_init(&lane->mutex, NULL);
}

void bkv_lane_close(struct bkv_lane *lane)
{
    if (lane->state == BKV_LANE_OPEN)
        bkv_ring_close(&lane->ring);
    lane->state = BKV_LANE_REFUSED;
}

void bkv_lane_abandon(struct bkv_lane *lane)
{
    if (lane->state == BKV_LANE_OPEN)
        close(lane->ring.uring.ring_fd);
}

static bool is_for(const struct bkv_engine *engine, const struct bkv_batch *batch)
{
    return engine->options.backend == BKV_BACKEND_IO_URING && batch->operations_bytes <= LANE_BYTES
           && !batch->deadline_ns;
}

/* With its first batch the lane gets its ring. */
static bool is_open(struct bkv_engine *engine)
{
    struct bkv_lane *lane = &engine->lane;
    const char *step;
    if (lane->state == BKV_LANE_UNUSED) {
        bool opened = !bkv_ring_open(&lane->ring, LANE_DEPTH, BKV_RING_SHARED, &step);
        lane->state = opened ? BKV_LANE_OPEN : BKV_LANE_REFUSED;
        lane->has_file = opened && !bkv_ring_register_file(&lane->ring, engine->options.fd);
    }
    return lane->state == BKV_LANE_OPEN;
}

static void issue(struct run *run, struct bkv_operation *operation)
{
    struct bkv_counts *counts = &run->engine->counts;
    struct io_uring_sqe *sqe = bkv_ring_sqe(&run->lane->ring);
    uint32_t count;
    const struct iovec *memory = bkv_operation_memory(operation, &count);
    bkv_ring_prepare(sqe, operation, memory, count, false);
    sqe->fd = run->lane->has_file ? 0 : run->engine->options.fd;
    sqe->flags = run->lane->has_file ? IOSQE_FIXED_FILE : 0;
    run->in_flight++;
    bkv_count(&counts->device_requests, 1);
    if (operation->transfer_count > 1)
        bkv_count(&counts->coalesced_requests, 1);
}

static void enter(struct run *run, uint32_t wait_count)
{
    bkv_count(&run->engine->counts.ring_enters, 1);
    if (bkv_ring_enter(&run->lane->ring, wait_count)) {
        /* As in the reactor: requests in flight own the caller's memory, so there is nothing to do but come back. */
        struct timespec pause = {.tv_sec = 0, .tv_nsec = 1000000};
        nanosleep(&pause, NULL);
    }
}

static void reap(struct run *run)
{
    uint64_t user_data;
    int32_t result;
    while (bkv_ring_next(&run->lane->ring, &user_data, &result)) {
        struct bkv_operation *operation = (struct bkv_operation *)(uintptr_t)user_data;
        run->in_flight--;
        operation = bkv_operation_settle(run->engine, operation, result, &run->again);
        if (operation)
            bkv_engine_finish(run->engine, operation);
    }
}

/* Staging for an operation; waits for some of our own requests, or for others, to give theirs back. */
static void stage(struct run *run, struct bkv_operation *operation)
{
    struct bkv_staging *staging = &run->engine->staging;
    uint8_t *slot;
    while (!(slot = bkv_staging_take(staging, operation->staging_bytes)) && run->in_flight) {
        enter(run, 1);
        reap(run);
    }
    if (!slot)
        slot = bkv_staging_take_wait(staging, operation->staging_bytes);
    bkv_operation_attach_staging(operation, slot);
    if (operation->batch->direction == BKV_WRITE)
        bkv_operation_copy_in(run->engine, operation);
}

/* Leaves of writes, while the device works. */
static void hash(struct run *run)
{
    struct bkv_batch *batch = run->batch;
    uint64_t settled = 0, hashed_bytes = 0;
    for (uint32_t t = 0; t < batch->transfer_count; t++)
        for (uint64_t leaf = 0; leaf < batch->transfers[t].leaf_count; leaf++) {
            if (batch->leaf_with_copy && batch->leaf_with_copy[batch->leaf_bases[t] + leaf])
                continue;
            hashed_bytes += bkv_batch_hash(batch, t, leaf);
            settled++;
        }
    bkv_count(&run->engine->counts.hashed_bytes, hashed_bytes);
    bkv_engine_release(run->engine, batch, settled);
}

static void carry_out(struct run *run)
{
    struct bkv_batch *batch = run->batch;
    bool hashed = batch->direction == BKV_READ;
    for (uint32_t next = 0; next < batch->operation_count || run->again.count || run->in_flight;) {
        struct bkv_operation *operation;
        while (run->in_flight < LANE_DEPTH && (operation = bkv_list_pop(&run->again)))
            issue(run, operation);
        while (run->in_flight < LANE_DEPTH && next < batch->operation_count) {
            operation = &batch->operations[next++];
            if (operation->staging_bytes) {
                stage(run, operation);
                issue(run, operation);
                enter(run, 0); /* the next copy takes a while */
            } else {
                issue(run, operation);
            }
        }
        if (!hashed && next == batch->operation_count) {
            enter(run, 0);
            hash(run);
            hashed = true;
        }
        enter(run, run->in_flight ? 1 : 0);
        reap(run);
    }
    if (!hashed)
        hash(run);
}

bool bkv_lane_run(struct bkv_engine *engine, struct bkv_batch *batch)
{
    struct bkv_lane *lane = &engine->lane;
    if (!is_for(engine, batch) || pthread_mutex_trylock(&lane->mutex))
        return false;
    bool opened = is_open(engine);
    if (opened) {
        struct run run = {.engine = engine, .lane = lane, .batch = batch};
        /* One more for this thread: the batch must not complete before the last use of it here. */
        atomic_fetch_add_explicit(&batch->pending, batch->operation_count + 1u, memory_order_relaxed);
        carry_out(&run);
        bkv_engine_release(engine, batch, 1);
    }
    pthread_mutex_unlock(&lane->mutex);
    return opened;
}
