/* Workers: the CPU work that must not hold up the reactor. */
#include "internal.h"

enum {
    HASH_ITEMS = 8,             /* leaves taken from the queue at once, ... */
    HASH_BYTES = 1024 * 1024,   /* ... up to about this much */
};

struct hash_item {
    uint32_t transfer;
    uint64_t leaf;
};

/* Moves the cursor to the next leaf to hash; false when there is none left. */
static bool seek_leaf(struct bkv_batch *batch)
{
    for (; batch->hash_transfer < batch->transfer_count; batch->hash_transfer++, batch->hash_leaf = 0) {
        uint64_t base = batch->leaf_bases[batch->hash_transfer];
        for (; batch->hash_leaf < batch->transfers[batch->hash_transfer].leaf_count; batch->hash_leaf++)
            if (!batch->leaf_with_copy || !batch->leaf_with_copy[base + batch->hash_leaf])
                return true;
    }
    return false;
}

/* Takes a few leaves off the first batch waiting to be hashed. Call with the mutex held. Leaves taken are pending in
 * the batch, so it stays until they are released; a batch with none left must leave the queue at once. */
static struct bkv_batch *take_leaves(struct bkv_work *work, struct hash_item items[HASH_ITEMS], uint32_t *count)
{
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++) {
        struct bkv_batch *batch = work->hashes[class].first;
        if (!batch)
            continue;
        uint64_t bytes = 0;
        bool more = seek_leaf(batch);
        *count = 0;
        while (more && *count < HASH_ITEMS && bytes < HASH_BYTES) {
            items[(*count)++] = (struct hash_item){batch->hash_transfer, batch->hash_leaf++};
            bytes += batch->transfers[batch->hash_transfer].leaf_bytes;
            more = seek_leaf(batch);
        }
        if (!more) {
            work->hashes[class].first = batch->hash_next;
            if (!batch->hash_next)
                work->hashes[class].last = NULL;
        }
        return batch;
    }
    return NULL;
}

static struct bkv_operation *take_operation(struct bkv_work *work)
{
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++) {
        struct bkv_operation *operation = bkv_list_pop(&work->operations[class]);
        if (operation)
            return operation;
    }
    return NULL;
}

static void handle(struct bkv_engine *engine, struct bkv_operation *operation)
{
    if (operation->batch->direction == BKV_READ) {
        bkv_engine_finish(engine, operation);
        return;
    }
    bkv_operation_copy_in(engine, operation);
    struct bkv_inbox *inbox = &engine->inbox;
    pthread_mutex_lock(&inbox->mutex);
    bkv_list_push(&inbox->ready[operation->batch->priority], operation);
    bkv_inbox_tell(engine);
    pthread_mutex_unlock(&inbox->mutex);
}

static void *run(void *argument)
{
    struct bkv_engine *engine = argument;
    struct bkv_work *work = &engine->work;
    pthread_mutex_lock(&work->mutex);
    for (;;) {
        struct hash_item items[HASH_ITEMS];
        uint32_t count;
        struct bkv_operation *operation;
        struct bkv_batch *batch;
        if ((operation = take_operation(work))) {
            pthread_mutex_unlock(&work->mutex);
            handle(engine, operation);
        } else if ((batch = take_leaves(work, items, &count))) {
            pthread_mutex_unlock(&work->mutex);
            uint64_t hashed_bytes = 0;
            for (uint32_t i = 0; i < count; i++)
                hashed_bytes += bkv_batch_hash(batch, items[i].transfer, items[i].leaf);
            bkv_count(&engine->counts.hashed_bytes, hashed_bytes);
            bkv_engine_release(engine, batch, count);
        } else if (work->stopping) {
            pthread_mutex_unlock(&work->mutex);
            return NULL;
        } else {
            work->idle_count++;
            pthread_cond_wait(&work->arrived, &work->mutex);
            work->idle_count--;
            continue;
        }
        pthread_mutex_lock(&work->mutex);
    }
}

/* As many as there is work for. Call with the mutex held. */
static void wake(struct bkv_work *work, uint64_t items)
{
    for (uint32_t i = 0; i < work->idle_count && i < items; i++)
        pthread_cond_signal(&work->arrived);
}

void bkv_workers_add(struct bkv_engine *engine, struct bkv_operation_list operations[BKV_PRIORITY_COUNT])
{
    struct bkv_work *work = &engine->work;
    uint64_t count = 0;
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++)
        count += operations[class].count;
    if (!count)
        return;
    pthread_mutex_lock(&work->mutex);
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++)
        bkv_list_append(&work->operations[class], &operations[class]);
    wake(work, count);
    pthread_mutex_unlock(&work->mutex);
}

void bkv_workers_hash(struct bkv_engine *engine, struct bkv_batch *batch)
{
    struct bkv_work *work = &engine->work;
    pthread_mutex_lock(&work->mutex);
    struct bkv_batch_list *list = &work->hashes[batch->priority];
    batch->hash_next = NULL;
    if (list->last)
        list->last->hash_next = batch;
    else
        list->first = batch;
    list->last = batch;
    wake(work, batch->transfer_count);
    pthread_mutex_unlock(&work->mutex);
}

int bkv_workers_start(struct bkv_engine *engine)
{
    int code = 0;
    while (engine->worker_count < engine->options.workers && !code) {
        code = bkv_thread_start(&engine->worker_threads[engine->worker_count], "blockkv-work", run, engine);
        engine->worker_count += !code;
    }
    return code;
}

void bkv_workers_stop(struct bkv_engine *engine)
{
    struct bkv_work *work = &engine->work;
    pthread_mutex_lock(&work->mutex);
    work->stopping = true;
    pthread_cond_broadcast(&work->arrived);
    pthread_mutex_unlock(&work->mutex);
    while (engine->worker_count)
        pthread_join(engine->worker_threads[--engine->worker_count], NULL);
}
