#define _GNU_SOURCE
#include "memory.h"

#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14, the same on every architecture */
#endif

#define PAGE_BYTES 4096ULL

uint64_t bkv_first_unwritable(const uint64_t *addresses, uint64_t first, uint64_t count)
{
    for (uint64_t i = first; i < count; i++)
        if (madvise((void *)(uintptr_t)(addresses[i] & ~(PAGE_BYTES - 1)), PAGE_BYTES, MADV_POPULATE_WRITE))
            return i;
    return count;
}
