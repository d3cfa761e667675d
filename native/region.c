#include "region.h"

#include <errno.h>
#include <string.h>

void bkv_regions_open(struct bkv_regions *regions)
{
    memset(regions, 0, sizeof *regions);
    pthread_rwlock_init(&regions->lock, NULL);
    regions->slot_used[BKV_STAGING_SLOT] = true;
}

void bkv_regions_close(struct bkv_regions *regions)
{
    pthread_rwlock_destroy(&regions->lock);
}

static uint32_t slots(uint64_t length_bytes)
{
    return (uint32_t)((length_bytes + BKV_REGION_SLOT_BYTES - 1) / BKV_REGION_SLOT_BYTES);
}

int bkv_regions_room(const struct bkv_regions *regions, uint64_t length_bytes, uint32_t *first_slot)
{
    if (length_bytes > (uint64_t)BKV_REGION_SLOTS * BKV_REGION_SLOT_BYTES)
        return -ENOSPC;
    int handle = 0;
    while (handle < BKV_REGION_COUNT && regions->table[handle].slot_count)
        handle++;
    if (handle == BKV_REGION_COUNT)
        return -ENOSPC;
    uint32_t run = 0, count = slots(length_bytes);
    for (uint32_t slot = 0; slot < BKV_REGION_SLOTS; slot++) {
        run = regions->slot_used[slot] ? 0 : run + 1;
        if (run == count) {
            *first_slot = slot + 1 - count;
            return handle;
        }
    }
    return -ENOSPC;
}

void bkv_regions_add(struct bkv_regions *regions, int handle, const struct bkv_region *region)
{
    pthread_rwlock_wrlock(&regions->lock);
    regions->table[handle] = *region;
    memset(regions->slot_used + region->first_slot, true, region->slot_count);
    regions->count++;
    pthread_rwlock_unlock(&regions->lock);
}

bool bkv_regions_remove(struct bkv_regions *regions, int handle, struct bkv_region *region)
{
    if (handle < 0 || handle >= BKV_REGION_COUNT || !regions->table[handle].slot_count)
        return false;
    pthread_rwlock_wrlock(&regions->lock);
    *region = regions->table[handle];
    memset(&regions->table[handle], 0, sizeof *region);
    memset(regions->slot_used + region->first_slot, false, region->slot_count);
    regions->count--;
    pthread_rwlock_unlock(&regions->lock);
    return true;
}

int32_t bkv_regions_find(const struct bkv_regions *regions, uint64_t address, uint64_t length_bytes)
{
    uint32_t left = regions->count;
    for (uint32_t i = 0; left && i < BKV_REGION_COUNT; i++) {
        const struct bkv_region *region = &regions->table[i];
        if (!region->slot_count)
            continue;
        left--;
        if (address < region->address || address + length_bytes > region->address + region->length_bytes)
            continue;
        uint64_t from = (address - region->address) / BKV_REGION_SLOT_BYTES;
        uint64_t to = (address + length_bytes - 1 - region->address) / BKV_REGION_SLOT_BYTES;
        return from == to ? (int32_t)(region->first_slot + from) : -1;
    }
    return -1;
}
