/* What the files of the engine share. */
#ifndef BKV_INTERNAL_H
#define BKV_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "batch.h"
#include "cipher.h"
#include "engine.h"
#include "lane.h"
#include "operation.h"
#include "region.h"
#include "staging.h"
#include "turns.h"

enum {
    /* Of the backend where io_uring is refused: enough 256 KiB requests in flight to fill an NVMe drive; more threads
     * only contend. */
    BKV_POOL_THREADS = 16,
    /* Copying or hashing this much takes about as long as waking a worker for it: a few microseconds. */
    BKV_INLINE_BYTES = 32768,
    /* Requests that keep the device busy until some of them have completed. */
    BKV_BUSY_REQUESTS = 8,
};

struct bkv_counts {
    _Atomic uint64_t device_read_bytes, device_write_bytes, device_requests, ring_enters;
    _Atomic uint64_t placed_bytes[BKV_PLACEMENT_COUNT];
    _Atomic uint64_t bounced_bytes, bounced_transfers, direct_bytes;
    _Atomic uint64_t fixed_requests, coalesced_requests, short_transfers, resubmitted, isolated_requests;
    _Atomic uint64_t flushes, discards, hashed_bytes, expired_requests, arena_bytes;
};

struct bkv_batch_list {
    struct bkv_batch *first, *last;
};

/* A request to the reactor that is no transfer; lives on the stack of the thread that waits for it. */
struct bkv_control {
    struct bkv_control *next;
    enum { BKV_CONTROL_REGISTER, BKV_CONTROL_UNREGISTER, BKV_CONTROL_ARENA_ADD, BKV_CONTROL_ARENA_REMOVE } kind;
    uint64_t address, length_bytes;
    int handle;
    int result;
    bool done;
};

/* What reaches the backend: new batches, operations ready to be issued (their staging is filled), controls. */
struct bkv_inbox {
    pthread_mutex_t mutex;
    pthread_cond_t arrived;      /* for a backend that has nothing in flight */
    pthread_cond_t control_done;
    struct bkv_batch_list batches[BKV_PRIORITY_COUNT];
    struct bkv_operation_list ready[BKV_PRIORITY_COUNT];
    struct bkv_control *controls;
    uint32_t idle_count;         /* pool threads that wait */
    struct bkv_turns turns;      /* of the pool */
    bool staging_freed;
    bool stopping;
    bool in_ring;                /* the reactor sleeps in io_uring_enter: wake it through the eventfd */
    uint32_t flight_count;       /* requests that are in the ring meanwhile */
};

/* What reaches the workers: operations (fill their staging, or finish them) and batches to hash. */
struct bkv_work {
    pthread_mutex_t mutex;
    pthread_cond_t arrived;
    struct bkv_operation_list operations[BKV_PRIORITY_COUNT];
    struct bkv_batch_list hashes[BKV_PRIORITY_COUNT];
    uint32_t idle_count;
    bool stopping;
};

struct bkv_reactor;

struct bkv_engine {
    struct bkv_options options;
    uint32_t operation_bytes;
    struct bkv_counts counts;
    struct bkv_staging staging;
    struct bkv_regions regions;
    struct bkv_inbox inbox;
    struct bkv_work work;
    struct bkv_lane lane;
    struct bkv_cipher *cipher; /* NULL: nothing is encrypted */

    struct bkv_reactor *reactor; /* NULL: the pool is the backend */
    pthread_t *pool_threads;
    uint32_t pool_thread_count;
    pthread_t *worker_threads;
    uint32_t worker_count;

    pthread_mutex_t done_mutex;
    pthread_cond_t announced; /* a batch with a token is done, or the engine is closed */
    pthread_cond_t drained;   /* nothing is in flight; or closing has finished */
    struct bkv_batch_list done;
    uint64_t active_count;
    enum { BKV_OPEN, BKV_CLOSING, BKV_CLOSED } state;
};

static inline void bkv_count(_Atomic uint64_t *counter, uint64_t amount)
{
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}

/* CLOCK_MONOTONIC. */
uint64_t bkv_now_ns(void);

void bkv_batch_list_push(struct bkv_batch_list *list, struct bkv_batch *batch);
struct bkv_batch *bkv_batch_list_pop(struct bkv_batch_list *list);

/* A thread with every signal blocked: signals belong to the application's threads. */
int bkv_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);

/* Call with the inbox mutex held, after putting `operation_count` operations (or something else: 1) in. */
void bkv_inbox_wake(struct bkv_engine *engine, uint32_t operation_count);

/* The same for what only goes on with something: a device that is busy for a while need not hear of it yet. */
void bkv_inbox_tell(struct bkv_engine *engine);

/* Ends an operation: staging back, leaves of reads hashed, batch completed when it was the last. */
void bkv_engine_finish(struct bkv_engine *engine, struct bkv_operation *operation);
/* Gives back `amount` of what is pending in the batch. The batch may be gone afterwards. */
void bkv_engine_release(struct bkv_engine *engine, struct bkv_batch *batch, uint64_t amount);
/* Whether finishing is worth a worker: a copy or checksums of some size. */
bool bkv_engine_finish_is_heavy(const struct bkv_operation *operation);

int bkv_reactor_start(struct bkv_engine *engine, struct bkv_failure *failure);
void bkv_reactor_stop(struct bkv_engine *engine);
void bkv_reactor_wake(struct bkv_reactor *reactor);
void bkv_reactor_abandon(struct bkv_reactor *reactor);

int bkv_pool_start(struct bkv_engine *engine);
/* Reads or writes what is left of an operation, here and now: bytes moved, or a negative errno. */
int32_t bkv_pool_transfer(struct bkv_engine *engine, const struct bkv_operation *operation);
void bkv_pool_stop(struct bkv_engine *engine);

int bkv_workers_start(struct bkv_engine *engine);
void bkv_workers_stop(struct bkv_engine *engine);
void bkv_workers_add(struct bkv_engine *engine, struct bkv_operation_list operations[BKV_PRIORITY_COUNT]);
void bkv_workers_hash(struct bkv_engine *engine, struct bkv_batch *batch);

#endif
