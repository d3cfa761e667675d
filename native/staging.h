/* The staging ring: bounded, huge-page-backed memory through which misaligned memory reaches the device.
 *
 * Handed out in runs of 4 KiB pages, next fit. Thread-safe. Excluded from core dumps and from forked children.
 */
#ifndef BKV_STAGING_H
#define BKV_STAGING_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct bkv_staging {
    pthread_mutex_t mutex;
    pthread_cond_t freed;
    uint8_t *base;
    uint8_t *mapping;
    uint64_t mapping_bytes;
    uint32_t page_count, free_pages;
    uint32_t cursor;
    uint8_t *used; /* one byte per page */
    bool waiting;  /* the reactor found no room and wants to be told when there is */
};

int bkv_staging_open(struct bkv_staging *staging, uint64_t length_bytes);
void bkv_staging_close(struct bkv_staging *staging);

/* NULL when there is no room: then `waiting` is set, and the next free returns true. */
uint8_t *bkv_staging_take(struct bkv_staging *staging, uint32_t length_bytes);

/* Waits for room. For threads that hold no staging themselves. */
uint8_t *bkv_staging_take_wait(struct bkv_staging *staging, uint32_t length_bytes);

/* True when somebody who got NULL should try again. */
bool bkv_staging_give(struct bkv_staging *staging, uint8_t *slot, uint32_t length_bytes);

#endif
