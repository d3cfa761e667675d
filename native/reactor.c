/* The reactor: the one thread that owns the ring. It issues operations in the order of their class, keeps up to
 * `depth` of them in flight, and enters the kernel once for many: to submit what is new and to wait for what is due. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "arena.h"
#include "internal.h"
#include "passthrough.h"
#include "ring.h"
#include "turns.h"

enum {
    /* user_data of what is no operation; those are aligned, so neither is the address of one */
    EVENT_TAG = 1,
    ALARM_TAG = 2,
};

enum {
    WAKE_BYTES = 1 << 19,
    /* What stores, and preloads, may have on the device at a time: enough for any drive, and the next load waits for
     * no more of it; and while loads come and go, just enough to keep it busy. */
    WINDOW_BYTES = 32 << 20,
    SHARED_WINDOW_BYTES = 4 << 20,
    LOADS_LINGER_NS = 50000000,
};

struct bkv_reactor {
    struct bkv_engine *engine;
    struct bkv_ring ring;
    pthread_t thread;
    int event_fd;
    bool event_armed;
    bool event_read;                  /* and its alarm not yet */
    uint64_t event_value;
    struct __kernel_timespec at_once; /* how long the alarm waits: not at all */
    bool has_file, has_buffers;
    bool is_passthrough;
    bool fixed_refused; /* the kernel takes no registered memory, although it registers it */
    bool staging_tried, staging_registered;
    struct bkv_arenas arenas;

    struct bkv_batch_list queue[BKV_PRIORITY_COUNT];
    uint32_t deadline_count;                     /* batches in the queues that have one */
    uint64_t class_bytes[BKV_PRIORITY_COUNT];    /* taken from the queues and not over */
    uint32_t taken_count;                        /* operations of these */
    uint64_t load_bytes;                         /* of BKV_LOAD what is read: metadata are written in that class too */
    struct bkv_turns turns;
    uint64_t load_seen_ns;                       /* when there was last a load; 0: long ago */
    struct bkv_operation_list ready[BKV_PRIORITY_COUNT];
    struct bkv_batch *active; /* batches with operations in the ring */
    uint32_t in_flight;
    bool staging_exhausted; /* an operation at the head of a queue waits for staging */

    /* start-up handshake */
    pthread_mutex_t start_mutex;
    pthread_cond_t started;
    bool start_done;
    int start_code;
    const char *start_step;
};

static void activate(struct bkv_reactor *reactor, struct bkv_batch *batch)
{
    if (batch->ring_count++)
        return;
    batch->active_previous = NULL;
    batch->active_next = reactor->active;
    if (reactor->active)
        reactor->active->active_previous = batch;
    reactor->active = batch;
}

static void deactivate(struct bkv_reactor *reactor, struct bkv_batch *batch)
{
    if (--batch->ring_count)
        return;
    if (batch->active_previous)
        batch->active_previous->active_next = batch->active_next;
    else
        reactor->active = batch->active_next;
    if (batch->active_next)
        batch->active_next->active_previous = batch->active_previous;
}

static int device_fd(const struct bkv_reactor *reactor)
{
    const struct bkv_options *options = &reactor->engine->options;
    return reactor->is_passthrough ? options->passthrough_fd : options->fd;
}

static void issue(struct bkv_reactor *reactor, struct bkv_operation *operation)
{
    struct bkv_counts *counts = &reactor->engine->counts;
    struct io_uring_sqe *sqe = bkv_ring_sqe(&reactor->ring); /* the ring has an entry for each of `depth`, and more */
    uint32_t count;
    const struct iovec *memory = bkv_operation_memory(operation, &count);
    bool fixed = count == 1 && operation->fixed_index >= 0 && !reactor->fixed_refused;
    if (reactor->is_passthrough)
        bkv_passthrough_prepare(sqe, &reactor->engine->options, operation, memory, count, fixed);
    else
        bkv_ring_prepare(sqe, operation, memory, count, fixed);
    sqe->fd = reactor->has_file ? 0 : device_fd(reactor);
    sqe->flags = reactor->has_file ? IOSQE_FIXED_FILE : 0;
    sqe->user_data = (uintptr_t)operation;
    reactor->in_flight++;
    activate(reactor, operation->batch);
    bkv_count(&counts->device_requests, 1);
    bkv_count(&counts->fixed_requests, fixed);
    if (operation->transfer_count > 1)
        bkv_count(&counts->coalesced_requests, 1);
}

/* Registering the staging ring makes it resident, so it waits for the first operation that needs it. A refusal
 * (the memlock limit) only makes its requests dearer. */
static void register_staging(struct bkv_reactor *reactor)
{
    struct bkv_engine *engine = reactor->engine;
    reactor->staging_tried = true;
    reactor->staging_registered = reactor->has_buffers
                                  && !bkv_ring_set_buffer(&reactor->ring, BKV_STAGING_SLOT, engine->staging.base,
                                                          engine->options.staging_bytes);
}

/* Staging for an operation at the head of its queue. False: no room. */
static bool stage(struct bkv_reactor *reactor, struct bkv_operation *operation)
{
    uint8_t *slot = bkv_staging_take(&reactor->engine->staging, operation->staging_bytes);
    if (!slot)
        return false;
    if (!reactor->staging_tried)
        register_staging(reactor);
    bkv_operation_attach_staging(operation, slot);
    if (reactor->staging_registered && operation->iov_count == 1)
        operation->fixed_index = BKV_STAGING_SLOT;
    return true;
}

/* Whether the device may get more of a class. It serves what it has got in an order of its own, so a load waits for
 * whatever was handed over before it: while there are loads, the others get just enough to keep it busy. */
static bool has_room(const struct bkv_reactor *reactor, int class, bool loads_about)
{
    if (reactor->in_flight >= reactor->engine->options.depth)
        return false;
    return class == BKV_LOAD || reactor->class_bytes[class] < (loads_about ? SHARED_WINDOW_BYTES : WINDOW_BYTES);
}

/* Whether loads are in the ring or about to be, or were a moment ago. */
static bool loads_are_about(struct bkv_reactor *reactor)
{
    const struct bkv_batch *next = reactor->queue[BKV_LOAD].first;
    if (reactor->load_bytes || (next && next->direction == BKV_READ))
        reactor->load_seen_ns = bkv_now_ns();
    else if (!reactor->load_seen_ns)
        return false;
    else if (bkv_now_ns() - reactor->load_seen_ns > LOADS_LINGER_NS)
        reactor->load_seen_ns = 0;
    return reactor->load_seen_ns != 0;
}

/* Fails what is left of a batch that is in no queue any more. */
static void expire(struct bkv_reactor *reactor, struct bkv_batch *batch)
{
    struct bkv_operation *operations = batch->operations;
    uint32_t from = batch->next_operation, to = batch->operation_count;
    bkv_count(&reactor->engine->counts.expired_requests, to - from);
    for (uint32_t i = from; i < to; i++) {
        bkv_operation_refuse(reactor->engine, &operations[i], -ETIME);
        bkv_engine_finish(reactor->engine, &operations[i]); /* the last one may free the batch */
    }
}

/* Takes the batches whose deadline has passed out of the queues. */
static void expire_all(struct bkv_reactor *reactor)
{
    if (!reactor->deadline_count)
        return;
    uint64_t now_ns = bkv_now_ns();
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++) {
        struct bkv_batch_list kept = {0};
        struct bkv_batch *batch;
        while ((batch = bkv_batch_list_pop(&reactor->queue[class]))) {
            if (batch->deadline_ns && now_ns >= batch->deadline_ns) {
                reactor->deadline_count--;
                expire(reactor, batch);
            } else {
                bkv_batch_list_push(&kept, batch);
            }
        }
        reactor->queue[class] = kept;
    }
}

static void look_into_arenas(struct bkv_reactor *reactor, struct bkv_operation *operation)
{
    struct bkv_engine *engine = reactor->engine;
    operation->fixed_index = bkv_arena_slot(&reactor->arenas, &engine->regions, &reactor->ring,
                                            (uintptr_t)operation->iovs->iov_base, operation->iovs->iov_len);
    atomic_store_explicit(&engine->counts.arena_bytes, reactor->arenas.registered_bytes, memory_order_relaxed);
}

/* Issues the next operation of a class. False: it has none, or depth, window or staging do not allow it. */
static bool issue_next(struct bkv_reactor *reactor, int class, bool loads_about,
                       struct bkv_operation_list fill[BKV_PRIORITY_COUNT])
{
    struct bkv_operation *operation;
    if (reactor->in_flight < reactor->engine->options.depth && (operation = bkv_list_pop(&reactor->ready[class]))) {
        bkv_turn_use(&reactor->turns, class, operation->length_bytes);
        issue(reactor, operation);
        return true;
    }
    struct bkv_batch *batch = reactor->queue[class].first;
    if (!batch || reactor->staging_exhausted || !has_room(reactor, class, loads_about))
        return false;
    operation = &batch->operations[batch->next_operation];
    if (operation->staging_bytes && !stage(reactor, operation)) {
        reactor->staging_exhausted = true;
        return false;
    }
    reactor->class_bytes[class] += operation->length_bytes;
    reactor->taken_count++;
    if (class == BKV_LOAD && batch->direction == BKV_READ)
        reactor->load_bytes += operation->length_bytes;
    bkv_turn_use(&reactor->turns, class, operation->length_bytes);
    if (reactor->arenas.count && operation->wants_fixed && operation->fixed_index < 0)
        look_into_arenas(reactor, operation);
    if (++batch->next_operation == batch->operation_count) {
        bkv_batch_list_pop(&reactor->queue[class]);
        reactor->deadline_count -= batch->deadline_ns != 0;
    }
    if (batch->direction == BKV_WRITE && operation->staging_bytes > BKV_INLINE_BYTES) {
        bkv_list_push(&fill[class], operation);
        return true;
    }
    if (batch->direction == BKV_WRITE && operation->staging_bytes)
        bkv_operation_copy_in(reactor->engine, operation);
    issue(reactor, operation);
    return true;
}

static bool turn_is_due(struct bkv_reactor *reactor, int class, uint64_t now_ns)
{
    bool waits = reactor->queue[class].first || reactor->ready[class].first;
    return bkv_turn_due(&reactor->turns, class, waits, now_ns);
}

/* Issues what depth and windows allow. Operations that hold staging come before those that want some, in every class:
 * otherwise a load could wait for staging held by a store that waits for the load. */
static void issue_all(struct bkv_reactor *reactor)
{
    struct bkv_operation_list fill[BKV_PRIORITY_COUNT] = {0};
    expire_all(reactor);
    bool loads_about = loads_are_about(reactor);
    reactor->staging_exhausted = false;
    uint64_t now_ns = bkv_now_ns();
    for (int class = BKV_LOAD + 1; class < BKV_PRIORITY_COUNT; class++)
        while (turn_is_due(reactor, class, now_ns) && issue_next(reactor, class, loads_about, fill))
            ;
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++)
        while (issue_next(reactor, class, loads_about, fill))
            ;
    bkv_workers_add(reactor->engine, fill);
}

static void complete(struct bkv_reactor *reactor, struct bkv_operation *operation, int32_t answer,
                     struct bkv_operation_list heavy[BKV_PRIORITY_COUNT])
{
    struct bkv_batch *batch = operation->batch;
    struct bkv_operation_list again = {0};
    reactor->in_flight--;
    deactivate(reactor, batch);
    if (reactor->is_passthrough)
        answer = bkv_passthrough_answer(&reactor->engine->options, operation, answer, &reactor->fixed_refused);
    struct bkv_operation *finished = bkv_operation_settle(reactor->engine, operation, answer, &again);
    bkv_list_append(&reactor->ready[batch->priority], &again);
    if (!finished)
        return;
    reactor->class_bytes[batch->priority] -= finished->length_bytes;
    reactor->taken_count--;
    if (batch->priority == BKV_LOAD && batch->direction == BKV_READ)
        reactor->load_bytes -= finished->length_bytes;
    if (bkv_engine_finish_is_heavy(finished))
        bkv_list_push(&heavy[batch->priority], finished);
    else
        bkv_engine_finish(reactor->engine, finished);
}

static void reap(struct bkv_reactor *reactor)
{
    struct bkv_operation_list heavy[BKV_PRIORITY_COUNT] = {0};
    uint64_t user_data;
    int32_t result;
    while (bkv_ring_next(&reactor->ring, &user_data, &result)) {
        if (user_data == ALARM_TAG)
            reactor->event_armed = reactor->event_read = false;
        else if (user_data == EVENT_TAG)
            reactor->event_read = true;
        else
            complete(reactor, (struct bkv_operation *)(uintptr_t)user_data, result, heavy);
    }
    bkv_workers_add(reactor->engine, heavy);
}

static int control_register(struct bkv_reactor *reactor, const struct bkv_control *control)
{
    struct bkv_regions *regions = &reactor->engine->regions;
    struct bkv_region region = {.address = control->address, .length_bytes = control->length_bytes};
    if (!reactor->has_buffers)
        return -EOPNOTSUPP;
    int handle = bkv_regions_room(regions, control->length_bytes, &region.first_slot);
    if (handle < 0)
        return handle;
    for (uint64_t done = 0; done < region.length_bytes; region.slot_count++) {
        uint64_t left = region.length_bytes - done;
        uint64_t n = left < BKV_REGION_SLOT_BYTES ? left : BKV_REGION_SLOT_BYTES;
        int code = bkv_ring_set_buffer(&reactor->ring, region.first_slot + region.slot_count,
                                       (const void *)(uintptr_t)(region.address + done), n);
        if (code) {
            while (region.slot_count)
                bkv_ring_set_buffer(&reactor->ring, region.first_slot + --region.slot_count, NULL, 0);
            return code;
        }
        done += n;
    }
    bkv_regions_add(regions, handle, &region);
    return handle;
}

static int control_unregister(struct bkv_reactor *reactor, const struct bkv_control *control)
{
    struct bkv_region region;
    if (!bkv_regions_remove(&reactor->engine->regions, control->handle, &region))
        return -EINVAL;
    for (uint32_t i = 0; i < region.slot_count; i++)
        bkv_ring_set_buffer(&reactor->ring, region.first_slot + i, NULL, 0);
    return 0;
}

static int carry_out(struct bkv_reactor *reactor, const struct bkv_control *control)
{
    struct bkv_engine *engine = reactor->engine;
    switch (control->kind) {
    case BKV_CONTROL_REGISTER:
        return control_register(reactor, control);
    case BKV_CONTROL_UNREGISTER:
        return control_unregister(reactor, control);
    case BKV_CONTROL_ARENA_ADD:
        return reactor->has_buffers ? bkv_arena_add(&reactor->arenas, control->address, control->length_bytes)
                                    : -EOPNOTSUPP;
    default:
        bkv_arena_remove(&reactor->arenas, &engine->regions, &reactor->ring, control->address);
        atomic_store_explicit(&engine->counts.arena_bytes, reactor->arenas.registered_bytes, memory_order_relaxed);
        return 0;
    }
}

/* Empties the inbox. Call with its mutex held; drops it while it carries out controls. */
static void take_inbox(struct bkv_reactor *reactor)
{
    struct bkv_inbox *inbox = &reactor->engine->inbox;
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++) {
        struct bkv_batch_list *from = &inbox->batches[class], *to = &reactor->queue[class];
        for (const struct bkv_batch *batch = from->first; batch; batch = batch->next)
            reactor->deadline_count += batch->deadline_ns != 0;
        if (from->first) {
            if (to->last)
                to->last->next = from->first;
            else
                to->first = from->first;
            to->last = from->last;
            *from = (struct bkv_batch_list){0};
        }
        bkv_list_append(&reactor->ready[class], &inbox->ready[class]);
    }
    inbox->staging_freed = false;
    while (inbox->controls) {
        struct bkv_control *control = inbox->controls;
        inbox->controls = control->next;
        pthread_mutex_unlock(&inbox->mutex);
        int result = carry_out(reactor, control);
        pthread_mutex_lock(&inbox->mutex);
        control->result = result;
        control->done = true;
        pthread_cond_broadcast(&inbox->control_done);
    }
}

static bool inbox_is_empty(const struct bkv_inbox *inbox)
{
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++)
        if (inbox->batches[class].first || inbox->ready[class].first)
            return false;
    return !inbox->controls && !inbox->staging_freed;
}

static bool ready_is_empty(const struct bkv_reactor *reactor)
{
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++)
        if (reactor->ready[class].first)
            return false;
    return true;
}

static bool queues_are_empty(const struct bkv_reactor *reactor)
{
    for (int class = 0; class < BKV_PRIORITY_COUNT; class++)
        if (reactor->queue[class].first)
            return false;
    return ready_is_empty(reactor);
}

/* How many completions to sleep for. Leaves of reads are hashed as their operations arrive: soon, while the data are
 * still in a cache, and with little left to do after the last one. So about WAKE_BYTES at a time, and towards the end
 * of a batch all but the last few operations. Writes were hashed while they were submitted; and nobody is told
 * anything before the last operation of a batch. */
static uint32_t wait_count(const struct bkv_reactor *reactor)
{
    const struct bkv_batch *nearest = reactor->active;
    if (!nearest)
        return 1;
    for (const struct bkv_batch *batch = nearest->active_next; batch; batch = batch->active_next)
        if (batch->ring_count < nearest->ring_count)
            nearest = batch;
    uint32_t count = nearest->ring_count > 2 ? nearest->ring_count - 2 : 1;
    uint64_t enough = nearest->direction == BKV_WRITE || !nearest->transfers->leaf_bytes
                          ? reactor->engine->options.depth / 4
                          : WAKE_BYTES * (uint64_t)nearest->operation_count / nearest->operations_bytes;
    if (count > enough)
        count = enough ? (uint32_t)enough : 1;
    /* More waits for room, or is being copied: come back while the device still has most of what it was given. */
    bool all_given = queues_are_empty(reactor) && reactor->taken_count <= reactor->in_flight;
    uint32_t most = all_given ? count : reactor->in_flight / 4;
    return count < most ? count : most ? most : 1;
}

/* Arms the wake-up: a read of the eventfd, and linked to it a timeout of no duration. The read alone would count
 * as one completion of the many that the reactor waits for; a timeout sends it back to user space at once. */
static void arm_event(struct bkv_reactor *reactor)
{
    if (reactor->event_armed)
        return;
    struct io_uring_sqe *event = bkv_ring_sqe(&reactor->ring);
    event->opcode = IORING_OP_READ;
    event->flags = IOSQE_IO_LINK;
    event->fd = reactor->event_fd;
    event->addr = (uintptr_t)&reactor->event_value;
    event->len = sizeof reactor->event_value;
    event->user_data = EVENT_TAG;
    struct io_uring_sqe *alarm = bkv_ring_sqe(&reactor->ring);
    alarm->opcode = IORING_OP_TIMEOUT;
    alarm->fd = -1;
    alarm->addr = (uintptr_t)&reactor->at_once;
    alarm->len = 1;
    alarm->user_data = ALARM_TAG;
    reactor->event_armed = true;
}

/* Carries out, by other system calls, what the kernel has not got and will not. */
static void carry_out_here(struct bkv_reactor *reactor)
{
    struct bkv_operation_list heavy[BKV_PRIORITY_COUNT] = {0};
    uint64_t user_data;
    while (bkv_ring_take_back(&reactor->ring, &user_data)) {
        struct bkv_operation *operation = (struct bkv_operation *)(uintptr_t)user_data;
        if (user_data == ALARM_TAG)
            reactor->event_armed = reactor->event_read = false;
        else if (user_data != EVENT_TAG)
            complete(reactor, operation, bkv_pool_transfer(reactor->engine, operation), heavy);
    }
    bkv_workers_add(reactor->engine, heavy);
}

static void enter(struct bkv_reactor *reactor)
{
    struct bkv_inbox *inbox = &reactor->engine->inbox;
    arm_event(reactor);
    pthread_mutex_lock(&inbox->mutex);
    bool sleep = inbox_is_empty(inbox);
    inbox->in_ring = sleep;
    inbox->flight_count = reactor->in_flight;
    pthread_mutex_unlock(&inbox->mutex);
    bkv_count(&reactor->engine->counts.ring_enters, 1);
    /* Between the event and its alarm nothing is armed: the alarm is due at once. */
    int code = bkv_ring_enter(&reactor->ring, !sleep ? 0 : reactor->event_read ? 1 : wait_count(reactor));
    if (bkv_ring_is_forbidden(code))
        carry_out_here(reactor);
    if (code && reactor->in_flight) {
        /* The kernel is short of memory for requests, or the ring was taken from us (a late seccomp filter).
         * Requests in flight still own callers' memory, so there is nothing to do but to come back. */
        struct timespec pause = {.tv_sec = 0, .tv_nsec = 1000000};
        nanosleep(&pause, NULL);
    }
}

/* Sleeps outside the ring until something arrives. Returns false when the engine stops. */
static bool wait_for_work(struct bkv_reactor *reactor)
{
    struct bkv_inbox *inbox = &reactor->engine->inbox;
    pthread_mutex_lock(&inbox->mutex);
    inbox->in_ring = false; /* from here on a signal wakes us, and the event would not */
    while (inbox_is_empty(inbox) && !inbox->stopping)
        pthread_cond_wait(&inbox->arrived, &inbox->mutex);
    /* `stopping` is set only after the last batch was done, so no worker holds an operation either */
    bool stop = inbox->stopping && inbox_is_empty(inbox);
    pthread_mutex_unlock(&inbox->mutex);
    return !stop;
}

static void loop(struct bkv_reactor *reactor)
{
    struct bkv_inbox *inbox = &reactor->engine->inbox;
    do {
        for (;;) {
            pthread_mutex_lock(&inbox->mutex);
            inbox->in_ring = false;
            take_inbox(reactor);
            pthread_mutex_unlock(&inbox->mutex);
            issue_all(reactor);
            /* What is still in a queue waits for staging, or for room in its window: a worker has what is in the
             * way, and wakes us. */
            if (!reactor->in_flight)
                break;
            enter(reactor);
            reap(reactor);
        }
    } while (wait_for_work(reactor));
}

static int open_ring(struct bkv_reactor *reactor)
{
    const struct bkv_options *options = &reactor->engine->options;
    int code = bkv_ring_open(&reactor->ring, options->depth + 2,
                             reactor->is_passthrough ? BKV_RING_WIDE : BKV_RING_OWNED, &reactor->start_step);
    if (code)
        return code;
    if (reactor->is_passthrough && (code = bkv_passthrough_try(&reactor->ring, options))) {
        reactor->start_step = "io_uring command to the namespace";
        bkv_ring_close(&reactor->ring);
        return code;
    }
    code = bkv_ring_register_file(&reactor->ring, device_fd(reactor), options->lifeline_fd);
    if (code && options->lifeline_fd >= 0) {
        reactor->start_step = "io_uring_register of files";
        bkv_ring_close(&reactor->ring);
        return code;
    }
    /* Without a lifeline both only make requests cheaper. */
    reactor->has_file = !code;
    reactor->has_buffers = !bkv_ring_register_buffer_table(&reactor->ring, BKV_REGION_SLOTS);
    return 0;
}

static void *run(void *argument)
{
    struct bkv_reactor *reactor = argument;
    int code = open_ring(reactor);
    pthread_mutex_lock(&reactor->start_mutex);
    reactor->start_code = code;
    reactor->start_done = true;
    pthread_cond_signal(&reactor->started);
    pthread_mutex_unlock(&reactor->start_mutex);
    if (code)
        return NULL;
    loop(reactor);
    bkv_ring_close(&reactor->ring);
    return NULL;
}

static void destroy(struct bkv_reactor *reactor)
{
    if (reactor->event_fd >= 0)
        close(reactor->event_fd);
    pthread_cond_destroy(&reactor->started);
    pthread_mutex_destroy(&reactor->start_mutex);
    bkv_arenas_close(&reactor->arenas);
    free(reactor);
}

int bkv_reactor_start(struct bkv_engine *engine, struct bkv_failure *failure)
{
    struct bkv_reactor *reactor = calloc(1, sizeof *reactor);
    if (!reactor)
        return -ENOMEM;
    reactor->engine = engine;
    reactor->is_passthrough = engine->options.backend == BKV_BACKEND_PASSTHROUGH;
    pthread_mutex_init(&reactor->start_mutex, NULL);
    pthread_cond_init(&reactor->started, NULL);
    reactor->start_step = "pthread_create";
    reactor->event_fd = eventfd(0, EFD_CLOEXEC); /* blocking, so that the ring waits for it */
    int code = reactor->event_fd < 0 ? -errno : bkv_thread_start(&reactor->thread, "blockkv-ring", run, reactor);
    if (!code) {
        pthread_mutex_lock(&reactor->start_mutex);
        while (!reactor->start_done)
            pthread_cond_wait(&reactor->started, &reactor->start_mutex);
        code = reactor->start_code;
        pthread_mutex_unlock(&reactor->start_mutex);
        if (code)
            pthread_join(reactor->thread, NULL);
    }
    if (code) {
        failure->code = code;
        snprintf(failure->message, sizeof failure->message, "%s", reactor->start_step);
        destroy(reactor);
        return code;
    }
    engine->reactor = reactor;
    return 0;
}

void bkv_reactor_stop(struct bkv_engine *engine)
{
    struct bkv_inbox *inbox = &engine->inbox;
    pthread_mutex_lock(&inbox->mutex);
    inbox->stopping = true;
    bkv_inbox_wake(engine, 1);
    pthread_mutex_unlock(&inbox->mutex);
    pthread_join(engine->reactor->thread, NULL);
    destroy(engine->reactor);
    engine->reactor = NULL;
}

void bkv_reactor_wake(struct bkv_reactor *reactor)
{
    uint64_t one = 1;
    while (write(reactor->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void bkv_reactor_abandon(struct bkv_reactor *reactor)
{
    close(reactor->ring.uring.ring_fd);
    close(reactor->event_fd);
}
