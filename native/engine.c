#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"
#include "plan.h"

enum { PAGE_BYTES = 4096 };

void bkv_batch_list_push(struct bkv_batch_list *list, struct bkv_batch *batch)
{
    batch->next = NULL;
    if (list->last)
        list->last->next = batch;
    else
        list->first = batch;
    list->last = batch;
}

struct bkv_batch *bkv_batch_list_pop(struct bkv_batch_list *list)
{
    struct bkv_batch *batch = list->first;
    if (batch) {
        list->first = batch->next;
        if (!list->first)
            list->last = NULL;
    }
    return batch;
}

uint64_t bkv_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

int bkv_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!code)
        pthread_setname_np(*thread, name);
    return -code;
}

void bkv_inbox_wake(struct bkv_engine *engine, uint32_t operation_count)
{
    struct bkv_inbox *inbox = &engine->inbox;
    if (!engine->reactor) {
        for (uint32_t i = 0; i < operation_count && i < inbox->idle_count; i++)
            pthread_cond_signal(&inbox->arrived);
    } else if (inbox->in_ring) {
        inbox->in_ring = false; /* one wake is enough */
        bkv_reactor_wake(engine->reactor);
    } else {
        pthread_cond_signal(&inbox->arrived);
    }
}

void bkv_inbox_tell(struct bkv_engine *engine)
{
    if (!engine->inbox.in_ring || engine->inbox.flight_count < BKV_BUSY_REQUESTS)
        bkv_inbox_wake(engine, 1);
}

static void complete(struct bkv_engine *engine, struct bkv_batch *batch)
{
    bkv_batch_publish(batch);
    pthread_mutex_lock(&engine->done_mutex);
    if (batch->token) {
        bkv_batch_list_push(&engine->done, batch);
        pthread_cond_signal(&engine->announced);
    } else {
        batch->done = true;
        pthread_cond_signal(&batch->done_cond);
    }
    if (!--engine->active_count)
        pthread_cond_broadcast(&engine->drained);
    pthread_mutex_unlock(&engine->done_mutex);
}

void bkv_engine_release(struct bkv_engine *engine, struct bkv_batch *batch, uint64_t amount)
{
    /* acq_rel: whoever brings it to zero sees every result and every leaf */
    if (amount && atomic_fetch_sub_explicit(&batch->pending, amount, memory_order_acq_rel) == amount)
        complete(engine, batch);
}

bool bkv_engine_finish_is_heavy(const struct bkv_operation *operation)
{
    const struct bkv_batch *batch = operation->batch;
    if (batch->direction == BKV_WRITE)
        return false;
    uint64_t bytes = operation->staging_bytes;
    for (uint32_t i = 0; i < operation->part_count && bytes <= BKV_INLINE_BYTES; i++) {
        const struct bkv_transfer *transfer = &batch->transfers[operation->parts[i].transfer];
        bytes += transfer->leaf_bytes < transfer->payload_bytes ? transfer->leaf_bytes : transfer->payload_bytes;
    }
    return bytes > BKV_INLINE_BYTES;
}

void bkv_engine_finish(struct bkv_engine *engine, struct bkv_operation *operation)
{
    struct bkv_batch *batch = operation->batch;
    for (uint32_t i = 0; i < operation->part_count; i++)
        if (operation->parts[i].result)
            bkv_batch_fail(batch, operation->parts[i].transfer, operation->parts[i].result);
    uint64_t settled = 1, hashed_bytes = 0;
    if (batch->direction == BKV_READ)
        settled += bkv_operation_arrived(engine, operation, &hashed_bytes);
    if (operation->staging
        && bkv_staging_give(&engine->staging, operation->staging, operation->staging_bytes) && engine->reactor) {
        pthread_mutex_lock(&engine->inbox.mutex);
        engine->inbox.staging_freed = true;
        bkv_inbox_tell(engine);
        pthread_mutex_unlock(&engine->inbox.mutex);
    }
    bkv_count(&engine->counts.hashed_bytes, hashed_bytes);
    bkv_engine_release(engine, batch, settled);
}

static bool is_power_of_two(uint32_t value)
{
    return value && !(value & (value - 1));
}

static int check_options(const struct bkv_options *options, struct bkv_failure *failure)
{
    if (!is_power_of_two(options->lba_bytes) || options->lba_bytes < 512 || options->lba_bytes > BKV_UNIT_BYTES)
        return bkv_refuse(failure, -EINVAL, "lba_bytes is %u: want a power of two from 512 to %d", options->lba_bytes,
                          BKV_UNIT_BYTES);
    if (!is_power_of_two(options->memory_alignment_bytes) || options->memory_alignment_bytes > PAGE_BYTES)
        return bkv_refuse(failure, -EINVAL, "memory_alignment_bytes is %u: want a power of two up to %d",
                          options->memory_alignment_bytes, PAGE_BYTES);
    if (options->max_transfer_bytes < BKV_UNIT_BYTES)
        return bkv_refuse(failure, -EINVAL, "max_transfer_bytes is %u: want at least %d", options->max_transfer_bytes,
                          BKV_UNIT_BYTES);
    if (!options->depth || options->depth > BKV_MAX_DEPTH)
        return bkv_refuse(failure, -EINVAL, "depth is %u: want 1 to %d", options->depth, BKV_MAX_DEPTH);
    if (!options->workers || options->workers > BKV_MAX_WORKERS)
        return bkv_refuse(failure, -EINVAL, "workers is %u: want 1 to %d", options->workers, BKV_MAX_WORKERS);
    if (options->memory_boundary_bytes && !is_power_of_two(options->memory_boundary_bytes))
        return bkv_refuse(failure, -EINVAL, "memory_boundary_bytes is %u: want 0 or a power of two",
                          options->memory_boundary_bytes);
    if (options->staging_bytes < 2 * BKV_MAX_OPERATION_BYTES || options->staging_bytes % BKV_UNIT_BYTES
        || options->staging_bytes > BKV_REGION_SLOT_BYTES)
        return bkv_refuse(failure, -EINVAL, "staging_bytes is %llu: want whole units of %d from %d to %d",
                          (unsigned long long)options->staging_bytes, BKV_UNIT_BYTES, 2 * BKV_MAX_OPERATION_BYTES,
                          BKV_REGION_SLOT_BYTES);
    return 0;
}

/* A multiple of the unit, so that operations of a long run are cut alike. */
static uint32_t operation_bytes(const struct bkv_options *options)
{
    uint32_t bytes = options->max_transfer_bytes;
    if (bytes > BKV_MAX_OPERATION_BYTES)
        bytes = BKV_MAX_OPERATION_BYTES;
    return bytes - bytes % BKV_UNIT_BYTES;
}

static void destroy(struct bkv_engine *engine)
{
    free(engine->worker_threads);
    bkv_cipher_close(engine->cipher);
    bkv_staging_close(&engine->staging);
    bkv_regions_close(&engine->regions);
    pthread_mutex_destroy(&engine->inbox.mutex);
    pthread_cond_destroy(&engine->inbox.arrived);
    pthread_cond_destroy(&engine->inbox.control_done);
    pthread_mutex_destroy(&engine->work.mutex);
    pthread_cond_destroy(&engine->work.arrived);
    pthread_mutex_destroy(&engine->lane.mutex);
    pthread_mutex_destroy(&engine->done_mutex);
    pthread_cond_destroy(&engine->announced);
    pthread_cond_destroy(&engine->drained);
    free(engine);
}

struct bkv_engine *bkv_engine_open(const struct bkv_options *options, struct bkv_failure *failure)
{
    memset(failure, 0, sizeof *failure);
    if (check_options(options, failure))
        return NULL;
    struct bkv_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        bkv_refuse(failure, -ENOMEM, "no memory for an engine");
        return NULL;
    }
    engine->options = *options;
    if (engine->options.max_segments < 2)
        engine->options.max_segments = 2;
    engine->operation_bytes = operation_bytes(&engine->options);
    pthread_mutex_init(&engine->inbox.mutex, NULL);
    pthread_cond_init(&engine->inbox.arrived, NULL);
    pthread_cond_init(&engine->inbox.control_done, NULL);
    pthread_mutex_init(&engine->work.mutex, NULL);
    pthread_cond_init(&engine->work.arrived, NULL);
    pthread_mutex_init(&engine->done_mutex, NULL);
    pthread_cond_init(&engine->announced, NULL);
    pthread_cond_init(&engine->drained, NULL);
    bkv_regions_open(&engine->regions);
    bkv_lane_open(&engine->lane);
    engine->worker_threads = calloc(options->workers, sizeof *engine->worker_threads);
    int code = engine->worker_threads ? bkv_staging_open(&engine->staging, options->staging_bytes) : -ENOMEM;
    if (code) {
        bkv_refuse(failure, code, "no memory for %llu bytes of staging", (unsigned long long)options->staging_bytes);
        destroy(engine);
        return NULL;
    }
    if (options->backend != BKV_BACKEND_THREADS)
        code = bkv_reactor_start(engine, failure);
    else if ((code = bkv_pool_start(engine)))
        bkv_refuse(failure, code, "pthread_create of the thread pool");
    if (!code && (code = bkv_workers_start(engine))) {
        bkv_refuse(failure, code, "pthread_create of the workers");
        bkv_workers_stop(engine);
        if (engine->reactor)
            bkv_reactor_stop(engine);
        else
            bkv_pool_stop(engine);
    }
    if (code) {
        destroy(engine);
        return NULL;
    }
    return engine;
}

int bkv_engine_encrypt(struct bkv_engine *engine, const uint8_t *key, uint64_t from_bytes, uint64_t to_bytes,
                       struct bkv_failure *failure)
{
    memset(failure, 0, sizeof *failure);
    if (from_bytes > to_bytes || to_bytes > engine->options.size_bytes || from_bytes % BKV_UNIT_BYTES
        || to_bytes % BKV_UNIT_BYTES)
        return bkv_refuse(failure, -EINVAL, "encryption of [%llu, %llu): want whole units of %d inside the device",
                          (unsigned long long)from_bytes, (unsigned long long)to_bytes, BKV_UNIT_BYTES);
    /* workers, pool or reactor, and whoever has the lane */
    uint32_t users = engine->options.workers + BKV_POOL_THREADS + 1;
    struct bkv_cipher *cipher = bkv_cipher_open(key, from_bytes, to_bytes, users, failure), *before = NULL;
    if (!cipher)
        return failure->code;
    pthread_mutex_lock(&engine->done_mutex);
    while (engine->state == BKV_OPEN && engine->active_count)
        pthread_cond_wait(&engine->drained, &engine->done_mutex);
    int code = engine->state == BKV_OPEN ? 0 : -ESHUTDOWN;
    if (!code) {
        before = engine->cipher;
        engine->cipher = cipher;
    }
    pthread_mutex_unlock(&engine->done_mutex);
    bkv_cipher_close(code ? cipher : before);
    return code ? bkv_refuse(failure, code, "the engine is closed") : 0;
}

/* Counts a call or batch that needs the device open; fails once the engine is closing. `idle`, unless NULL, tells
 * whether there is no other. */
static int begin(struct bkv_engine *engine, bool *idle)
{
    pthread_mutex_lock(&engine->done_mutex);
    int code = engine->state == BKV_OPEN ? 0 : -ESHUTDOWN;
    if (idle)
        *idle = !engine->active_count;
    engine->active_count += !code;
    pthread_mutex_unlock(&engine->done_mutex);
    return code;
}

static void end(struct bkv_engine *engine)
{
    pthread_mutex_lock(&engine->done_mutex);
    if (!--engine->active_count)
        pthread_cond_broadcast(&engine->drained);
    pthread_mutex_unlock(&engine->done_mutex);
}

/* Which leaves of a write are computed with the copy to staging. */
static void mark_leaves(struct bkv_batch *batch, uint64_t leaves)
{
    batch->leaf_with_copy = calloc(leaves, sizeof *batch->leaf_with_copy); /* without it they are hashed apart */
    for (uint32_t i = 0; batch->leaf_with_copy && i < batch->operation_count; i++)
        if (batch->operations[i].staging_bytes)
            batch->leaves_with_copy += bkv_operation_mark_leaves(&batch->operations[i]);
}

/* Gives a batch that counts as active to the reactor or the pool, and what is to be hashed to the workers. */
static void hand_over(struct bkv_engine *engine, struct bkv_batch *batch)
{
    uint64_t leaves = atomic_load_explicit(&batch->pending, memory_order_relaxed);
    /* One more for this thread: the batch must not complete while it is being handed over. */
    atomic_fetch_add_explicit(&batch->pending, batch->operation_count + 1u, memory_order_relaxed);
    if (batch->operation_count) {
        pthread_mutex_lock(&engine->inbox.mutex);
        bkv_batch_list_push(&engine->inbox.batches[batch->priority], batch);
        bkv_inbox_wake(engine, batch->operation_count);
        pthread_mutex_unlock(&engine->inbox.mutex);
    }
    uint64_t settled = 1;
    if (batch->direction == BKV_WRITE && leaves) {
        /* after the hand-over: the device is busy with it already */
        if (batch->memory_bytes <= BKV_INLINE_BYTES) {
            bkv_count(&engine->counts.hashed_bytes, bkv_batch_hash_all(batch));
            settled += leaves;
        } else if (batch->leaves_with_copy < leaves) {
            bkv_workers_hash(engine, batch);
        }
    }
    bkv_engine_release(engine, batch, settled);
}

int bkv_engine_submit(struct bkv_engine *engine, const struct bkv_request *request, struct bkv_batch **submitted,
                      struct bkv_failure *failure)
{
    struct bkv_batch *batch;
    int code = bkv_batch_open(&batch, request, &engine->options, failure);
    if (code)
        return code;
    struct bkv_plan_totals totals = {0};
    bool idle;
    code = bkv_plan(batch, &engine->options, engine->operation_bytes, engine->cipher, &engine->regions, &totals);
    if (code)
        bkv_refuse(failure, code, "no memory to plan %u transfers", batch->transfer_count);
    else if ((code = begin(engine, &idle)))
        bkv_refuse(failure, code, "the engine is closed");
    if (code) {
        bkv_batch_free(batch);
        return code;
    }
    bkv_count(&engine->counts.direct_bytes, totals.direct_bytes);
    bkv_count(&engine->counts.bounced_bytes, totals.bounced_bytes);
    bkv_count(&engine->counts.bounced_transfers, totals.bounced_transfers);
    batch->memory_bytes = totals.direct_bytes + totals.bounced_bytes;
    uint64_t leaves = atomic_load_explicit(&batch->pending, memory_order_relaxed);
    if (batch->direction == BKV_WRITE && leaves && batch->memory_bytes > BKV_INLINE_BYTES && totals.bounced_bytes)
        mark_leaves(batch, leaves);
    *submitted = batch;
    if (!request->on_caller || request->token || !bkv_lane_submit(engine, batch, idle))
        hand_over(engine, batch);
    return 0;
}

void bkv_engine_wait(struct bkv_engine *engine, struct bkv_batch **submitted)
{
    struct bkv_batch *batch = *submitted;
    if (batch->on_lane)
        bkv_lane_wait(engine, batch);
    pthread_mutex_lock(&engine->done_mutex);
    while (!batch->done)
        pthread_cond_wait(&batch->done_cond, &engine->done_mutex);
    pthread_mutex_unlock(&engine->done_mutex);
    *submitted = NULL;
    bkv_batch_free(batch);
}

uint64_t bkv_engine_next(struct bkv_engine *engine)
{
    pthread_mutex_lock(&engine->done_mutex);
    while (!engine->done.first && engine->state != BKV_CLOSED)
        pthread_cond_wait(&engine->announced, &engine->done_mutex);
    struct bkv_batch *batch = bkv_batch_list_pop(&engine->done);
    pthread_mutex_unlock(&engine->done_mutex);
    if (!batch)
        return 0;
    uint64_t token = batch->token;
    bkv_batch_free(batch);
    return token;
}

int bkv_engine_flush(struct bkv_engine *engine)
{
    int code = begin(engine, NULL);
    if (code)
        return code;
    /* Straight from the calling thread, which waits anyway: through the ring it would take a kernel worker thread.
     * Of a namespace the driver makes an NVMe Flush of it, which covers commands of the passthrough as well; and of
     * a discard a Dataset Management. */
    code = fdatasync(engine->options.fd) ? -errno : 0;
    bkv_count(&engine->counts.flushes, 1);
    end(engine);
    return code;
}

static int discard(int fd, uint64_t offset_bytes, uint64_t length_bytes)
{
    struct stat status;
    uint64_t range[2] = {offset_bytes, length_bytes};
    int code = fstat(fd, &status);
    if (!code && S_ISBLK(status.st_mode))
        code = ioctl(fd, BLKDISCARD, range);
    else if (!code)
        code = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset_bytes, (off_t)length_bytes);
    return code ? -errno : 0;
}

int bkv_engine_discard(struct bkv_engine *engine, uint64_t offset_bytes, uint64_t length_bytes)
{
    if (offset_bytes > engine->options.size_bytes || length_bytes > engine->options.size_bytes - offset_bytes)
        return -EINVAL;
    int code = begin(engine, NULL);
    if (code)
        return code;
    code = discard(engine->options.fd, offset_bytes, length_bytes);
    bkv_count(&engine->counts.discards, 1);
    end(engine);
    return code;
}

static int control(struct bkv_engine *engine, struct bkv_control *control)
{
    struct bkv_inbox *inbox = &engine->inbox;
    if (begin(engine, NULL))
        return -ESHUTDOWN;
    int result = -EOPNOTSUPP;
    if (engine->reactor) {
        pthread_mutex_lock(&inbox->mutex);
        control->next = inbox->controls;
        inbox->controls = control;
        bkv_inbox_wake(engine, 1);
        while (!control->done)
            pthread_cond_wait(&inbox->control_done, &inbox->mutex);
        result = control->result;
        pthread_mutex_unlock(&inbox->mutex);
    }
    end(engine);
    return result;
}

int bkv_engine_register(struct bkv_engine *engine, uint64_t address, uint64_t length_bytes)
{
    uint64_t end;
    if (!address || !length_bytes || __builtin_add_overflow(address, length_bytes, &end))
        return -EINVAL;
    return control(engine, &(struct bkv_control){
                               .kind = BKV_CONTROL_REGISTER, .address = address, .length_bytes = length_bytes});
}

int bkv_engine_unregister(struct bkv_engine *engine, int handle)
{
    return control(engine, &(struct bkv_control){.kind = BKV_CONTROL_UNREGISTER, .handle = handle});
}

int bkv_engine_arena_add(struct bkv_engine *engine, uint64_t address, uint64_t length_bytes)
{
    uint64_t end;
    if (!address || !length_bytes || __builtin_add_overflow(address, length_bytes, &end))
        return -EINVAL;
    return control(engine, &(struct bkv_control){
                               .kind = BKV_CONTROL_ARENA_ADD, .address = address, .length_bytes = length_bytes});
}

int bkv_engine_arena_remove(struct bkv_engine *engine, uint64_t address)
{
    return control(engine, &(struct bkv_control){.kind = BKV_CONTROL_ARENA_REMOVE, .address = address});
}

void bkv_engine_counters(const struct bkv_engine *engine, struct bkv_counters *counters)
{
#define READ(name) counters->name = atomic_load_explicit(&engine->counts.name, memory_order_relaxed)
    READ(device_read_bytes);
    READ(device_write_bytes);
    READ(device_requests);
    READ(ring_enters);
    READ(bounced_bytes);
    READ(bounced_transfers);
    READ(direct_bytes);
    READ(fixed_requests);
    READ(coalesced_requests);
    READ(short_transfers);
    READ(resubmitted);
    READ(isolated_requests);
    READ(flushes);
    READ(discards);
    READ(hashed_bytes);
    READ(expired_requests);
    READ(arena_bytes);
#undef READ
#define PLACED(place, name) \
    counters->name = atomic_load_explicit(&engine->counts.placed_bytes[place], memory_order_relaxed)
    PLACED(BKV_DATA, data_write_bytes);
    PLACED(BKV_METADATA, metadata_write_bytes);
    PLACED(BKV_BRIEF, brief_write_bytes);
    PLACED(BKV_KEPT, kept_write_bytes);
#undef PLACED
}

void bkv_engine_close(struct bkv_engine *engine)
{
    pthread_mutex_lock(&engine->done_mutex);
    bool mine = engine->state == BKV_OPEN;
    if (mine)
        engine->state = BKV_CLOSING;
    while (mine ? engine->active_count > 0 : engine->state != BKV_CLOSED)
        pthread_cond_wait(&engine->drained, &engine->done_mutex);
    pthread_mutex_unlock(&engine->done_mutex);
    if (!mine)
        return;
    if (engine->reactor)
        bkv_reactor_stop(engine);
    else
        bkv_pool_stop(engine);
    bkv_workers_stop(engine);
    bkv_lane_close(&engine->lane);
    bkv_staging_close(&engine->staging);
    pthread_mutex_lock(&engine->done_mutex);
    engine->state = BKV_CLOSED;
    pthread_cond_broadcast(&engine->drained);
    pthread_cond_broadcast(&engine->announced);
    pthread_mutex_unlock(&engine->done_mutex);
}

void bkv_engine_free(struct bkv_engine *engine)
{
    bkv_engine_close(engine);
    struct bkv_batch *batch;
    while ((batch = bkv_batch_list_pop(&engine->done)))
        bkv_batch_free(batch);
    destroy(engine);
}

void bkv_engine_abandon(struct bkv_engine *engine)
{
    if (engine->reactor)
        bkv_reactor_abandon(engine->reactor);
    bkv_lane_abandon(&engine->lane);
    if (engine->options.backend == BKV_BACKEND_PASSTHROUGH)
        close(engine->options.passthrough_fd);
    if (engine->options.lifeline_fd >= 0)
        close(engine->options.lifeline_fd);
    close(engine->options.fd);
}
