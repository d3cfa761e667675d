/* Arenas: memory that its owner promises to name before it is unmapped. Whatever part of one takes part in a transfer
 * is registered with the ring then, a slice at a time, so that later requests save the kernel the page lookups and
 * memory that is never used costs nothing. Only the reactor calls these.
 */
#ifndef BKV_ARENA_H
#define BKV_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"
#include "ring.h"

enum {
    BKV_ARENA_COUNT = 256,
    /* Registering makes memory resident: about as much as a few requests would touch anyway. */
    BKV_ARENA_SLICE_BYTES = 32 << 20,
};

struct bkv_arena {
    uint64_t address, length_bytes; /* length 0: free */
    uint16_t *slots;                /* of the kernel's table, one a slice; 0: not registered */
    bool refused;                   /* the kernel would not pin more: the memlock limit */
};

struct bkv_arenas {
    struct bkv_arena table[BKV_ARENA_COUNT];
    uint32_t count;
    uint64_t registered_bytes;
};

/* 0, -ENOSPC or -ENOMEM. */
int bkv_arena_add(struct bkv_arenas *arenas, uint64_t address, uint64_t length_bytes);
/* Unregisters what was registered of it. Nothing happens for an address that is no arena's. */
void bkv_arena_remove(struct bkv_arenas *arenas, struct bkv_regions *regions, struct bkv_ring *ring, uint64_t address);
/* Index of the kernel's entry that holds all of the memory, registered now if necessary; or -1. */
int32_t bkv_arena_slot(struct bkv_arenas *arenas, struct bkv_regions *regions, struct bkv_ring *ring, uint64_t address,
                       uint64_t length_bytes);
void bkv_arenas_close(struct bkv_arenas *arenas);

#endif
