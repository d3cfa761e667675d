#include "lane.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum { LANE_DEPTH = 32 };

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

static bool take(struct bkv_lane *lane, bool idle)
{
    pthread_mutex_lock(&lane->mutex);
    bool taken = lane->batch_count ? pthread_equal(lane->owner, pthread_self()) : idle;
    if (taken) {
        lane->owner = pthread_self();
        lane->batch_count++;
    }
    pthread_mutex_unlock(&lane->mutex);
    return taken;
}

static void give_back(struct bkv_lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    lane->batch_count--;
    pthread_mutex_unlock(&lane->mutex);
}

/* With its first batch the lane gets its ring. */
static bool is_open(struct bkv_engine *engine)
{
    struct bkv_lane *lane = &engine->lane;
    const char *step;
    if (lane->state == BKV_LANE_UNUSED) {
        int lifeline_fd = engine->options.lifeline_fd;
        bool opened = !bkv_ring_open(&lane->ring, LANE_DEPTH, BKV_RING_SHARED, &step);
        lane->has_file = opened && !bkv_ring_register_file(&lane->ring, engine->options.fd, lifeline_fd);
        if (opened && !lane->has_file && lifeline_fd >= 0) { /* the reactor's ring has it registered */
            bkv_ring_close(&lane->ring);
            opened = false;
        }
        lane->state = opened ? BKV_LANE_OPEN : BKV_LANE_REFUSED;
    }
    return lane->state == BKV_LANE_OPEN;
}

/* Carries out, by other system calls, what the kernel has not got and will not. */
static void carry_out_here(struct bkv_engine *engine)
{
    struct bkv_lane *lane = &engine->lane;
    uint64_t user_data;
    while (bkv_ring_take_back(&lane->ring, &user_data)) {
        struct bkv_operation *operation = (struct bkv_operation *)(uintptr_t)user_data;
        lane->in_flight--;
        operation = bkv_operation_settle(engine, operation, bkv_pool_transfer(engine, operation), &lane->again);
        if (operation)
            bkv_engine_finish(engine, operation);
    }
}

static void enter(struct bkv_engine *engine, uint32_t wait_count)
{
    bkv_count(&engine->counts.ring_enters, 1);
    int code = bkv_ring_enter(&engine->lane.ring, wait_count);
    if (bkv_ring_is_forbidden(code))
        carry_out_here(engine);
    if (code && engine->lane.in_flight) {
        /* As in the reactor: requests in flight own the caller's memory, so there is nothing to do but come back. */
        struct timespec pause = {.tv_sec = 0, .tv_nsec = 1000000};
        nanosleep(&pause, NULL);
    }
}

/* Takes all completions off the ring before it finishes one: once the last batch is done the engine may be closed, and
 * the ring with it. */
static void reap(struct bkv_engine *engine)
{
    struct bkv_lane *lane = &engine->lane;
    uint64_t operations[LANE_DEPTH];
    int32_t answers[LANE_DEPTH];
    uint32_t count = 0;
    while (count < LANE_DEPTH && bkv_ring_next(&lane->ring, &operations[count], &answers[count]))
        count++;
    lane->in_flight -= count;
    for (uint32_t i = 0; i < count; i++) {
        struct bkv_operation *operation = (struct bkv_operation *)(uintptr_t)operations[i];
        operation = bkv_operation_settle(engine, operation, answers[i], &lane->again);
        if (operation)
            bkv_engine_finish(engine, operation);
    }
}

static void issue(struct bkv_engine *engine, struct bkv_operation *operation)
{
    struct bkv_lane *lane = &engine->lane;
    struct io_uring_sqe *sqe = bkv_ring_sqe(&lane->ring);
    uint32_t count;
    const struct iovec *memory = bkv_operation_memory(operation, &count);
    bkv_ring_prepare(sqe, operation, memory, count, false);
    sqe->fd = lane->has_file ? 0 : engine->options.fd;
    sqe->flags = lane->has_file ? IOSQE_FIXED_FILE : 0;
    lane->in_flight++;
    bkv_count(&engine->counts.device_requests, 1);
    if (operation->transfer_count > 1)
        bkv_count(&engine->counts.coalesced_requests, 1);
}

/* Those that came back and are not over, some of which hold staging, while fewer than `depth` are in flight. */
static void issue_again(struct bkv_engine *engine, uint32_t depth)
{
    struct bkv_lane *lane = &engine->lane;
    struct bkv_operation *operation;
    while (lane->in_flight < depth && (operation = bkv_list_pop(&lane->again)))
        issue(engine, operation);
}

/* Staging for an operation; waits until requests of our own, or others, give theirs back. */
static void stage(struct bkv_engine *engine, struct bkv_operation *operation)
{
    struct bkv_lane *lane = &engine->lane;
    uint8_t *slot;
    while (!(slot = bkv_staging_take(&engine->staging, operation->staging_bytes))
           && (lane->in_flight || lane->again.count)) {
        issue_again(engine, LANE_DEPTH - 1); /* and one more for this operation */
        enter(engine, 1);
        reap(engine);
    }
    if (!slot)
        slot = bkv_staging_take_wait(&engine->staging, operation->staging_bytes);
    bkv_operation_attach_staging(operation, slot);
    if (operation->batch->direction == BKV_WRITE)
        bkv_operation_copy_in(engine, operation);
}

/* Issues operations of a batch, as many as there is room for; with `staged` also those that need staging. */
static void issue_some(struct bkv_engine *engine, struct bkv_batch *batch, bool staged)
{
    while (engine->lane.in_flight < LANE_DEPTH && batch->next_operation < batch->operation_count) {
        struct bkv_operation *operation = &batch->operations[batch->next_operation];
        if (operation->staging_bytes && !staged)
            return;
        if (operation->staging_bytes)
            stage(engine, operation);
        issue(engine, operation);
        if (operation->staging_bytes && batch->direction == BKV_WRITE)
            enter(engine, 0); /* the next copy takes a while */
        batch->next_operation++;
    }
}

/* Issues what may be: the batches in their order, and of those that need staging only the one that is waited for, so
 * that nobody holds staging while its thread does something else. */
static void issue_all(struct bkv_engine *engine, const struct bkv_batch *awaited)
{
    struct bkv_lane *lane = &engine->lane;
    issue_again(engine, LANE_DEPTH);
    for (struct bkv_batch **at = &lane->waiting; *at;) {
        struct bkv_batch *batch = *at;
        issue_some(engine, batch, batch == awaited);
        if (batch->next_operation == batch->operation_count)
            *at = batch->next;
        else
            at = &batch->next;
    }
}

/* Leaves of a write, while the device works. */
static void hash(struct bkv_engine *engine, struct bkv_batch *batch)
{
    uint64_t settled = 0, hashed_bytes = 0;
    for (uint32_t t = 0; t < batch->transfer_count; t++)
        for (uint64_t leaf = 0; leaf < batch->transfers[t].leaf_count; leaf++) {
            if (batch->leaf_with_copy && batch->leaf_with_copy[batch->leaf_bases[t] + leaf])
                continue;
            hashed_bytes += bkv_batch_hash(batch, t, leaf);
            settled++;
        }
    bkv_count(&engine->counts.hashed_bytes, hashed_bytes);
    bkv_engine_release(engine, batch, settled);
}

bool bkv_lane_submit(struct bkv_engine *engine, struct bkv_batch *batch, bool idle)
{
    struct bkv_lane *lane = &engine->lane;
    if (engine->options.backend != BKV_BACKEND_IO_URING || batch->deadline_ns || !batch->operation_count
        || !take(lane, idle))
        return false;
    if (!is_open(engine)) {
        give_back(lane);
        return false;
    }
    batch->on_lane = true;
    atomic_fetch_add_explicit(&batch->pending, batch->operation_count, memory_order_relaxed);
    struct bkv_batch **end = &lane->waiting;
    while (*end)
        end = &(*end)->next;
    *end = batch;
    batch->next = NULL;
    issue_all(engine, NULL);
    if (lane->in_flight)
        enter(engine, 0);
    return true;
}

void bkv_lane_wait(struct bkv_engine *engine, struct bkv_batch *batch)
{
    struct bkv_lane *lane = &engine->lane;
    bool hashed = batch->direction == BKV_READ;
    while (!batch->done) {
        issue_all(engine, batch);
        /* `next_operation` tells that the device has all of it, and the copies that hash leaves are made */
        if (!hashed && batch->next_operation == batch->operation_count) {
            enter(engine, 0);
            hash(engine, batch);
            hashed = true;
        }
        if (!batch->done) {
            enter(engine, lane->in_flight ? 1 : 0);
            reap(engine);
        }
    }
    give_back(lane);
}
