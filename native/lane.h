/* The lane: a second ring, for a thread that waits for one small batch and for nothing else.
 *
 * Through the reactor such a batch costs three wake-ups of threads: of the reactor, of a worker for the checksums, of
 * the thread that waits. On the lane that thread issues the requests itself, computes the checksums as they complete,
 * and only sleeps while the device works. One batch at a time, while the engine has nothing else to do: what arrives
 * meanwhile goes through the reactor, where classes are served in their order.
 *
 * The lane has no registered memory: pinning it twice would take twice the memlock limit.
 */
#ifndef BKV_LANE_H
#define BKV_LANE_H

#include <pthread.h>
#include <stdbool.h>

#include "ring.h"

struct bkv_batch;
struct bkv_engine;

struct bkv_lane {
    pthread_mutex_t mutex; /* whoever holds it has the ring */
    struct bkv_ring ring;
    enum { BKV_LANE_UNUSED, BKV_LANE_OPEN, BKV_LANE_REFUSED } state;
    bool has_file;
};

void bkv_lane_open(struct bkv_lane *lane);
void bkv_lane_close(struct bkv_lane *lane);

/* Carries out a batch that counts as active and was handed to nobody. False, with nothing begun, where the lane is
 * taken or not for it. */
bool bkv_lane_run(struct bkv_engine *engine, struct bkv_batch *batch);

/* In a forked child: see bkv_engine_abandon. */
void bkv_lane_abandon(struct bkv_lane *lane);

#endif
