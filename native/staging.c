#include "staging.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE_BYTES = 4096, HUGE_PAGE_BYTES = 2 << 20 };

static uint32_t pages(uint32_t length_bytes)
{
    return (length_bytes + PAGE_BYTES - 1) / PAGE_BYTES;
}

int bkv_staging_open(struct bkv_staging *staging, uint64_t length_bytes)
{
    memset(staging, 0, sizeof *staging);
    staging->page_count = staging->free_pages = (uint32_t)(length_bytes / PAGE_BYTES);
    staging->used = calloc(staging->page_count, 1);
    if (!staging->used)
        return -ENOMEM;
    staging->mapping_bytes = length_bytes + HUGE_PAGE_BYTES;
    void *mapping = mmap(NULL, staging->mapping_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        free(staging->used);
        staging->used = NULL;
        return -ENOMEM;
    }
    staging->mapping = mapping;
    uintptr_t aligned = ((uintptr_t)mapping + HUGE_PAGE_BYTES - 1) & ~(uintptr_t)(HUGE_PAGE_BYTES - 1);
    staging->base = (uint8_t *)aligned;
    /* Advice: a kernel without one of them still works. */
    (void)madvise(staging->base, length_bytes, MADV_HUGEPAGE);
    (void)madvise(staging->base, length_bytes, MADV_DONTDUMP); /* KV cache reveals prompts */
    (void)madvise(staging->base, length_bytes, MADV_DONTFORK);
    pthread_mutex_init(&staging->mutex, NULL);
    pthread_cond_init(&staging->freed, NULL);
    return 0;
}

void bkv_staging_close(struct bkv_staging *staging)
{
    if (!staging->used)
        return;
    munmap(staging->mapping, staging->mapping_bytes);
    free(staging->used);
    staging->used = NULL;
    pthread_cond_destroy(&staging->freed);
    pthread_mutex_destroy(&staging->mutex);
}

/* First run of `count` free pages in [from, to), or UINT32_MAX. */
static uint32_t find(const struct bkv_staging *staging, uint32_t from, uint32_t to, uint32_t count)
{
    uint32_t run = 0;
    for (uint32_t page = from; page < to; page++) {
        run = staging->used[page] ? 0 : run + 1;
        if (run == count)
            return page + 1 - count;
    }
    return UINT32_MAX;
}

static uint8_t *take_locked(struct bkv_staging *staging, uint32_t length_bytes)
{
    uint32_t count = pages(length_bytes);
    if (staging->free_pages < count)
        return NULL;
    uint32_t page = find(staging, staging->cursor, staging->page_count, count);
    if (page == UINT32_MAX)
        page = find(staging, 0, staging->page_count, count);
    if (page == UINT32_MAX)
        return NULL;
    memset(staging->used + page, 1, count);
    staging->free_pages -= count;
    staging->cursor = page + count;
    return staging->base + (uint64_t)page * PAGE_BYTES;
}

uint8_t *bkv_staging_take(struct bkv_staging *staging, uint32_t length_bytes)
{
    pthread_mutex_lock(&staging->mutex);
    uint8_t *slot = take_locked(staging, length_bytes);
    if (!slot)
        staging->waiting = true;
    pthread_mutex_unlock(&staging->mutex);
    return slot;
}

uint8_t *bkv_staging_take_wait(struct bkv_staging *staging, uint32_t length_bytes)
{
    uint8_t *slot;
    pthread_mutex_lock(&staging->mutex);
    while (!(slot = take_locked(staging, length_bytes)))
        pthread_cond_wait(&staging->freed, &staging->mutex);
    pthread_mutex_unlock(&staging->mutex);
    return slot;
}

bool bkv_staging_give(struct bkv_staging *staging, uint8_t *slot, uint32_t length_bytes)
{
    pthread_mutex_lock(&staging->mutex);
    uint32_t count = pages(length_bytes);
    memset(staging->used + (uint64_t)(slot - staging->base) / PAGE_BYTES, 0, count);
    staging->free_pages += count;
    bool waiting = staging->waiting;
    staging->waiting = false;
    pthread_cond_broadcast(&staging->freed);
    pthread_mutex_unlock(&staging->mutex);
    return waiting;
}
