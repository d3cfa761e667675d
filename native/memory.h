/* What can be asked about memory without touching it. */
#ifndef BKV_MEMORY_H
#define BKV_MEMORY_H

#include <stdint.h>

/* The first of `count` addresses, from `first` on, whose page the kernel will not fault in for writing, or `count`. */
uint64_t bkv_first_unwritable(const uint64_t *addresses, uint64_t first, uint64_t count);

#endif
