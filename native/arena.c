#include "arena.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint64_t slice_count(const struct bkv_arena *arena)
{
    return (arena->length_bytes + BKV_ARENA_SLICE_BYTES - 1) / BKV_ARENA_SLICE_BYTES;
}

static uint64_t slice_bytes(const struct bkv_arena *arena, uint64_t slice)
{
    uint64_t left = arena->length_bytes - slice * BKV_ARENA_SLICE_BYTES;
    return left < BKV_ARENA_SLICE_BYTES ? left : BKV_ARENA_SLICE_BYTES;
}

int bkv_arena_add(struct bkv_arenas *arenas, uint64_t address, uint64_t length_bytes)
{
    struct bkv_arena *arena = arenas->table;
    while (arena < arenas->table + BKV_ARENA_COUNT && arena->length_bytes)
        arena++;
    if (arena == arenas->table + BKV_ARENA_COUNT)
        return -ENOSPC;
    struct bkv_arena added = {.address = address, .length_bytes = length_bytes};
    added.slots = calloc(slice_count(&added), sizeof *added.slots);
    if (!added.slots)
        return -ENOMEM;
    *arena = added;
    arenas->count++;
    return 0;
}

void bkv_arena_remove(struct bkv_arenas *arenas, struct bkv_regions *regions, struct bkv_ring *ring, uint64_t address)
{
    for (struct bkv_arena *arena = arenas->table; arena < arenas->table + BKV_ARENA_COUNT; arena++) {
        if (!arena->length_bytes || arena->address != address)
            continue;
        for (uint64_t slice = 0; slice < slice_count(arena); slice++) {
            if (!arena->slots[slice])
                continue;
            bkv_ring_set_buffer(ring, arena->slots[slice], NULL, 0);
            regions->slot_used[arena->slots[slice]] = false;
            arenas->registered_bytes -= slice_bytes(arena, slice);
        }
        free(arena->slots);
        memset(arena, 0, sizeof *arena);
        arenas->count--;
        return;
    }
}

static void register_slice(struct bkv_arenas *arenas, struct bkv_arena *arena, uint64_t slice,
                           struct bkv_regions *regions, struct bkv_ring *ring)
{
    uint16_t slot = 0;
    while (slot < BKV_REGION_SLOTS && regions->slot_used[slot])
        slot++;
    const void *start = (const void *)(uintptr_t)(arena->address + slice * BKV_ARENA_SLICE_BYTES);
    if (slot == BKV_REGION_SLOTS || bkv_ring_set_buffer(ring, slot, start, slice_bytes(arena, slice))) {
        arena->refused = true; /* requests work without, they only cost more */
        return;
    }
    regions->slot_used[slot] = true;
    arena->slots[slice] = slot;
    arenas->registered_bytes += slice_bytes(arena, slice);
}

int32_t bkv_arena_slot(struct bkv_arenas *arenas, struct bkv_regions *regions, struct bkv_ring *ring, uint64_t address,
                       uint64_t length_bytes)
{
    uint32_t left = arenas->count;
    for (struct bkv_arena *arena = arenas->table; left; arena++) {
        left -= arena->length_bytes != 0;
        if (address < arena->address || address + length_bytes > arena->address + arena->length_bytes)
            continue;
        uint64_t from = (address - arena->address) / BKV_ARENA_SLICE_BYTES;
        if (from != (address + length_bytes - 1 - arena->address) / BKV_ARENA_SLICE_BYTES)
            return -1;
        if (!arena->slots[from] && !arena->refused)
            register_slice(arenas, arena, from, regions, ring);
        return arena->slots[from] ? arena->slots[from] : -1;
    }
    return -1;
}

void bkv_arenas_close(struct bkv_arenas *arenas)
{
    for (uint32_t i = 0; i < BKV_ARENA_COUNT; i++)
        free(arenas->table[i].slots);
}
