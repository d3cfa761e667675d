/* The backend where io_uring is refused: threads that carry out one operation at a time with preadv and pwritev. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>

#include "internal.h"

int32_t bkv_pool_transfer(struct bkv_engine *engine, const struct bkv_operation *operation)
{
    uint32_t count;
    const struct iovec *memory = bkv_operation_memory(operation, &count);
    off_t offset = (off_t)(operation->offset_bytes + operation->done_bytes);
    bkv_count(&engine->counts.device_requests, 1);
    if (operation->transfer_count > 1)
        bkv_count(&engine->counts.coalesced_requests, 1);
    ssize_t moved = operation->batch->direction == BKV_READ
                        ? preadv(engine->options.fd, memory, (int)count, offset)
                        : pwritev(engine->options.fd, memory, (int)count, offset);
    return moved < 0 ? -errno : (int32_t)moved;
}

static void carry_out(struct bkv_engine *engine, struct bkv_operation *operation)
{
    if (operation->batch->deadline_ns && bkv_now_ns() >= operation->batch->deadline_ns) {
        bkv_count(&engine->counts.expired_requests, 1);
        bkv_operation_refuse(engine, operation, -ETIME);
        bkv_engine_finish(engine, operation);
        return;
    }
    if (operation->staging_bytes) {
        bkv_operation_attach_staging(operation, bkv_staging_take_wait(&engine->staging, operation->staging_bytes));
        if (operation->batch->direction == BKV_WRITE)
            bkv_operation_copy_in(engine, operation);
    }
    struct bkv_operation_list again = {0};
    bkv_list_push(&again, operation);
    while ((operation = bkv_list_pop(&again))) {
        int32_t result = bkv_pool_transfer(engine, operation);
        struct bkv_operation *finished = bkv_operation_settle(engine, operation, result, &again);
        if (finished)
            bkv_engine_finish(engine, finished);
    }
}

static struct bkv_operation *take_from(struct bkv_inbox *inbox, int class)
{
    struct bkv_batch *batch = inbox->batches[class].first;
    if (!batch)
        return NULL;
    struct bkv_operation *operation = &batch->operations[batch->next_operation++];
    if (batch->next_operation == batch->operation_count)
        bkv_batch_list_pop(&inbox->batches[class]);
    bkv_turn_use(&inbox->turns, class, operation->length_bytes);
    return operation;
}

/* Call with the inbox mutex held. */
static struct bkv_operation *take(struct bkv_inbox *inbox)
{
    struct bkv_operation *operation = NULL;
    uint64_t now_ns = bkv_now_ns();
    for (int class = BKV_LOAD + 1; class < BKV_PRIORITY_COUNT && !operation; class++)
        if (bkv_turn_due(&inbox->turns, class, inbox->batches[class].first, now_ns))
            operation = take_from(inbox, class);
    for (int class = 0; class < BKV_PRIORITY_COUNT && !operation; class++)
        operation = take_from(inbox, class);
    return operation;
}

static void *run(void *argument)
{
    struct bkv_engine *engine = argument;
    struct bkv_inbox *inbox = &engine->inbox;
    pthread_mutex_lock(&inbox->mutex);
    for (;;) {
        struct bkv_operation *operation = take(inbox);
        if (operation) {
            pthread_mutex_unlock(&inbox->mutex);
            carry_out(engine, operation);
            pthread_mutex_lock(&inbox->mutex);
        } else if (inbox->stopping) {
            pthread_mutex_unlock(&inbox->mutex);
            return NULL;
        } else {
            inbox->idle_count++;
            pthread_cond_wait(&inbox->arrived, &inbox->mutex);
            inbox->idle_count--;
        }
    }
}

int bkv_pool_start(struct bkv_engine *engine)
{
    uint32_t wanted = engine->options.depth < BKV_POOL_THREADS ? engine->options.depth : BKV_POOL_THREADS;
    engine->pool_threads = calloc(wanted, sizeof *engine->pool_threads);
    if (!engine->pool_threads)
        return -ENOMEM;
    int code = 0;
    while (engine->pool_thread_count < wanted && !code) {
        code = bkv_thread_start(&engine->pool_threads[engine->pool_thread_count], "blockkv-pool", run, engine);
        engine->pool_thread_count += !code;
    }
    return engine->pool_thread_count ? 0 : code; /* fewer threads than wanted still work */
}

void bkv_pool_stop(struct bkv_engine *engine)
{
    struct bkv_inbox *inbox = &engine->inbox;
    pthread_mutex_lock(&inbox->mutex);
    inbox->stopping = true;
    pthread_cond_broadcast(&inbox->arrived);
    pthread_mutex_unlock(&inbox->mutex);
    while (engine->pool_thread_count)
        pthread_join(engine->pool_threads[--engine->pool_thread_count], NULL);
    free(engine->pool_threads);
    engine->pool_threads = NULL;
}
