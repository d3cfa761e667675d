/* Memory regions registered with the ring: inside one, a request needs no page lookups. */
#ifndef BKV_REGION_H
#define BKV_REGION_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    BKV_REGION_COUNT = 256,       /* handles */
    BKV_REGION_SLOTS = 1024,      /* entries of the kernel's table; entry 0 is the staging ring */
    BKV_REGION_SLOT_BYTES = 1 << 30, /* the kernel's limit for one entry */
    BKV_STAGING_SLOT = 0,
};

struct bkv_region {
    uint64_t address, length_bytes;
    uint32_t first_slot, slot_count; /* slot_count 0: free handle */
};

struct bkv_regions {
    pthread_rwlock_t lock;
    struct bkv_region table[BKV_REGION_COUNT];
    bool slot_used[BKV_REGION_SLOTS];
    uint32_t count;
};

void bkv_regions_open(struct bkv_regions *regions);
void bkv_regions_close(struct bkv_regions *regions);

/* Only the reactor adds and removes, one at a time: room found stays free until it is added.
 * Returns a handle, or -ENOSPC. */
int bkv_regions_room(const struct bkv_regions *regions, uint64_t length_bytes, uint32_t *first_slot);
void bkv_regions_add(struct bkv_regions *regions, int handle, const struct bkv_region *region);
/* False when there is no such handle. */
bool bkv_regions_remove(struct bkv_regions *regions, int handle, struct bkv_region *region);

/* Index of the kernel's entry that holds all of the memory, or -1. Call with the lock held for reading. */
int32_t bkv_regions_find(const struct bkv_regions *regions, uint64_t address, uint64_t length_bytes);

#endif
