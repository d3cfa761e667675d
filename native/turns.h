/* Turns: classes that come last are served a little even while those before them never end. */
#ifndef BKV_TURNS_H
#define BKV_TURNS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine.h"

enum {
    /* 80 MB/s for each class: little of a drive, and a put of 32 MiB is over in half a second. */
    BKV_TURN_BYTES = 4 << 20,
    BKV_TURN_NS = 50000000,
};

struct bkv_turns {
    uint64_t granted_ns[BKV_PRIORITY_COUNT]; /* when it was last granted a turn, or began to wait; 0: it does not */
    uint64_t left_bytes[BKV_PRIORITY_COUNT]; /* of its turn */
};

/* Whether it is the turn of a class, which `waits` or has nothing to do, before those that come first. */
static inline bool bkv_turn_due(struct bkv_turns *turns, int class, bool waits, uint64_t now_ns)
{
    if (!waits || !turns->granted_ns[class]) {
        turns->granted_ns[class] = waits ? now_ns : 0;
        turns->left_bytes[class] = 0;
    } else if (now_ns - turns->granted_ns[class] >= BKV_TURN_NS) {
        turns->granted_ns[class] = now_ns;
        turns->left_bytes[class] = BKV_TURN_BYTES;
    }
    return turns->left_bytes[class] != 0;
}

static inline void bkv_turn_use(struct bkv_turns *turns, int class, uint64_t bytes)
{
    turns->left_bytes[class] -= bytes < turns->left_bytes[class] ? bytes : turns->left_bytes[class];
}

#endif
