/* The lane: a second ring, for the calls of a thread that submits a little and then waits for it.
 *
 * Through the reactor a batch costs three wake-ups of threads: of the reactor, of a worker for the checksums, and of
 * the thread that waits. On the lane that thread issues the requests itself, computes the checksums as they complete,
 * and only sleeps while the device works. One thread has the lane at a time, and gets it when the engine has nothing
 * else to do; what others submit meanwhile goes through the reactor, where classes are served in their order.
 *
 * The lane has no registered memory: pinning it twice would take twice the memlock limit.
 */
#ifndef BKV_LANE_H
#define BKV_LANE_H

#include <pthread.h>
#include <stdbool.h>

#include "operation.h"
#include "ring.h"

struct bkv_batch;
struct bkv_engine;

struct bkv_lane {
    pthread_mutex_t mutex; /* of the next two */
    pthread_t owner;
    uint32_t batch_count;  /* not yet waited for; 0: nobody has the lane */

    /* of the owner */
    struct bkv_ring ring;
    enum { BKV_LANE_UNUSED, BKV_LANE_OPEN, BKV_LANE_REFUSED } state;
    bool has_file;
    struct bkv_batch *waiting; /* those with operations that were not issued yet */
    struct bkv_operation_list again;
    uint32_t in_flight;
};

void bkv_lane_open(struct bkv_lane *lane);
void bkv_lane_close(struct bkv_lane *lane);

/* Takes a batch that counts as active and was handed to nobody, when the calling thread has the lane or, the engine
 * being `idle`, gets it. Its requests are issued as far as they need no staging. False: it goes through the reactor. */
bool bkv_lane_submit(struct bkv_engine *engine, struct bkv_batch *batch, bool idle);

/* Carries out what is left of a batch that the lane took, on the thread that has submitted it. */
void bkv_lane_wait(struct bkv_engine *engine, struct bkv_batch *batch);

/* In a forked child: see bkv_engine_abandon. */
void bkv_lane_abandon(struct bkv_lane *lane);

#endif
