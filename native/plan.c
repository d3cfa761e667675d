/* Walks the extents of a batch in device order and cuts them into operations.
 *
 * Invariants of the result
 *   * every operation starts and ends on an LBA, is at most `operation_bytes` long, and its iovecs hold exactly
 *     its length;
 *   * every iovec is aligned for direct I/O and a multiple of the LBA long: caller's memory where it is so already,
 *     else a range of the staging slot;
 *   * an operation spans at most `max_segments` pages, so that the device takes it whole: the kernel would finish
 *     a split request on one of its worker threads;
 *   * inside an operation, iovecs meet at multiples of `memory_boundary_bytes`, if that is given: an NVMe command
 *     describes memory by pages, and the kernel would copy one that it cannot split.
 */
#include "plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAGE_BYTES = 4096,
    /* Below a page, a copy costs less than a scatter-gather segment of the device. */
    DIRECT_MINIMUM_BYTES = 4096,
    /* Where the pages run out, cut here rather than at an odd place: no flash unit is larger. */
    CUT_BYTES = 65536,
};

struct vector {
    void *items;
    uint32_t count, capacity;
};

struct planner {
    struct bkv_batch *batch;
    const struct bkv_options *options;
    struct bkv_regions *regions;
    struct bkv_plan_totals *totals;
    uint32_t operation_bytes;
    bool stage_all;
    uint32_t staging_alignment;
    struct vector operations, iovs, parts, copies, ranges;
    /* of the operation being built */
    struct bkv_operation *operation;
    uint32_t pages;
    uint32_t partial_bytes; /* how much of its last LBA is filled; the rest comes from the next fragment */
    bool last_is_staged;    /* whether its last iovec is a range of the staging slot */
    uint32_t bounced_transfer; /* last transfer counted as bounced, + 1 */
};

static void *grow(struct vector *vector, size_t item_bytes)
{
    if (vector->count == vector->capacity) {
        uint64_t capacity = vector->capacity ? 2 * (uint64_t)vector->capacity : 32;
        void *items = capacity > UINT32_MAX ? NULL : realloc(vector->items, capacity * item_bytes);
        if (!items)
            return NULL;
        vector->items = items;
        vector->capacity = (uint32_t)capacity;
    }
    void *item = (char *)vector->items + item_bytes * vector->count++;
    return memset(item, 0, item_bytes);
}

#define PUSH(vector, type) ((type *)grow(&(vector), sizeof(type)))
#define LAST(vector, type) (&((type *)(vector).items)[(vector).count - 1])

static uint32_t spanned_pages(uint64_t address, uint64_t length)
{
    return (uint32_t)((address % PAGE_BYTES + length + PAGE_BYTES - 1) / PAGE_BYTES);
}

static bool open_operation(struct planner *planner, uint64_t offset)
{
    struct bkv_operation *operation = PUSH(planner->operations, struct bkv_operation);
    if (!operation)
        return false;
    operation->batch = planner->batch;
    operation->offset_bytes = offset;
    operation->fixed_index = -1;
    planner->operation = operation;
    planner->pages = 0;
    planner->last_is_staged = false;
    return true;
}

static void close_operation(struct planner *planner)
{
    struct bkv_operation *operation = planner->operation;
    if (operation && operation->iov_count == 1 && !operation->staging_bytes) {
        const struct iovec *only = LAST(planner->iovs, struct iovec);
        /* Registered memory is pages to the kernel, and Linux 6.0 to 6.17 answers EINVAL where one of them does
         * not hold whole LBAs (iov_iter_is_aligned). Other memory is one piece to it. */
        operation->wants_fixed = (uintptr_t)only->iov_base % planner->options->lba_bytes == 0;
        if (operation->wants_fixed)
            operation->fixed_index =
                bkv_regions_find(planner->regions, (uintptr_t)only->iov_base, only->iov_len);
    }
    planner->operation = NULL;
}

/* The part of `transfer` that ends the operation so far; a new one where the payload does not continue. */
static struct bkv_part *part_for(struct planner *planner, uint32_t transfer, uint64_t payload_offset,
                                 uint32_t start)
{
    struct bkv_operation *operation = planner->operation;
    if (operation->part_count) {
        struct bkv_part *last = LAST(planner->parts, struct bkv_part);
        if (last->transfer == transfer && last->payload_offset + last->length_bytes == payload_offset)
            return last;
        operation->transfer_count += last->transfer != transfer;
    } else {
        operation->transfer_count = 1;
    }
    struct bkv_part *part = PUSH(planner->parts, struct bkv_part);
    if (!part)
        return NULL;
    part->transfer = transfer;
    part->payload_offset = payload_offset;
    part->start_bytes = start;
    operation->part_count++;
    return part;
}

/* Extends the operation by an iovec over caller's memory. */
static bool add_direct(struct planner *planner, uint64_t address, uint32_t length)
{
    struct bkv_operation *operation = planner->operation;
    struct iovec *last = operation->iov_count ? LAST(planner->iovs, struct iovec) : NULL;
    if (last && !planner->last_is_staged && (uintptr_t)last->iov_base + last->iov_len == address) {
        last->iov_len += length;
    } else {
        struct iovec *iov = PUSH(planner->iovs, struct iovec);
        if (!iov)
            return false;
        *iov = (struct iovec){(void *)(uintptr_t)address, length};
        operation->iov_count++;
        planner->last_is_staged = false;
    }
    planner->pages += spanned_pages(address, length);
    operation->length_bytes += length;
    return true;
}

/* The offset in the staging slot at which one more range of staging would start. */
static uint32_t next_staging_offset(const struct planner *planner)
{
    uint32_t alignment = planner->staging_alignment;
    return (planner->operation->staging_bytes + alignment - 1) / alignment * alignment;
}

/* Extends the operation by `length` bytes of staging, a multiple of the LBA. */
static bool add_staged(struct planner *planner, uint32_t length)
{
    struct bkv_operation *operation = planner->operation;
    if (planner->last_is_staged) {
        LAST(planner->iovs, struct iovec)->iov_len += length;
    } else {
        operation->staging_bytes = next_staging_offset(planner);
        struct iovec *iov = PUSH(planner->iovs, struct iovec);
        struct bkv_range *range = PUSH(planner->ranges, struct bkv_range);
        if (!iov || !range)
            return false;
        *iov = (struct iovec){NULL, length};
        *range = (struct bkv_range){operation->iov_count, operation->staging_bytes};
        operation->iov_count++;
        operation->range_count++;
        planner->last_is_staged = true;
    }
    planner->pages += spanned_pages(operation->staging_bytes, length);
    operation->staging_bytes += length;
    operation->length_bytes += length;
    return true;
}

static bool add_copy(struct planner *planner, uint64_t address, uint32_t length, uint32_t staging_offset,
                     uint32_t transfer)
{
    struct bkv_operation *operation = planner->operation;
    struct bkv_copy *copy = PUSH(planner->copies, struct bkv_copy);
    if (!copy)
        return false;
    copy->address = (uint8_t *)(uintptr_t)address;
    copy->length_bytes = length;
    copy->staging_offset = staging_offset;
    copy->part = operation->part_count - 1;
    operation->copy_count++;
    if (planner->bounced_transfer != transfer + 1) {
        planner->bounced_transfer = transfer + 1;
        planner->totals->bounced_transfers++;
    }
    return true;
}

/* Whether memory that follows makes a gap: a new iovec that does not meet the last one at a boundary. */
static bool makes_gap(const struct planner *planner, bool staged, uint64_t address)
{
    const struct bkv_operation *operation = planner->operation;
    const uint32_t boundary = planner->options->memory_boundary_bytes;
    if (!boundary || !operation->iov_count)
        return false;
    const struct iovec *last = LAST(planner->iovs, struct iovec);
    uint64_t end = planner->last_is_staged ? operation->staging_bytes : (uintptr_t)last->iov_base + last->iov_len;
    if (staged == planner->last_is_staged && (staged || end == address))
        return false;
    return (end | (staged ? next_staging_offset(planner) : address)) % boundary;
}

/* Adds memory (address 0: padding) that follows on the device at `offset`. */
static bool add_fragment(struct planner *planner, uint32_t transfer, uint64_t payload_offset, uint64_t offset,
                         uint64_t address, uint64_t length)
{
    const uint32_t lba = planner->options->lba_bytes;
    const bool direct = address && length >= DIRECT_MINIMUM_BYTES && !planner->stage_all;
    while (length) {
        struct bkv_operation *operation = planner->operation;
        uint32_t n, start;
        bool staged = !direct || address % planner->options->memory_alignment_bytes || length < lba;
        if (planner->partial_bytes) {
            /* The LBA is staged already: only the copy is missing. */
            staged = true;
            start = operation->length_bytes - lba + planner->partial_bytes;
            n = lba - planner->partial_bytes < length ? lba - planner->partial_bytes : (uint32_t)length;
            struct bkv_part *part = part_for(planner, transfer, payload_offset, start);
            if (!part
                || !add_copy(planner, address, n, operation->staging_bytes - lba + planner->partial_bytes, transfer))
                return false;
        } else {
            if (operation
                && (operation->offset_bytes + operation->length_bytes != offset
                    || operation->length_bytes >= planner->operation_bytes
                    || (planner->pages >= planner->options->max_segments && !planner->stage_all)
                    || makes_gap(planner, staged, address))) {
                close_operation(planner);
                operation = NULL;
            }
            if (!operation) {
                if (!open_operation(planner, offset))
                    return false;
                operation = planner->operation;
            }
            start = operation->length_bytes;
            uint64_t room = planner->operation_bytes - start;
            /* Memory for `pages` more pages, wherever in its first page it starts. */
            uint64_t pages = planner->options->max_segments - planner->pages;
            uint64_t reach = pages * PAGE_BYTES - (staged ? operation->staging_bytes : address) % PAGE_BYTES;
            if (room > reach && !planner->stage_all) {
                room = reach - reach % lba;
                if (room > CUT_BYTES)
                    room -= room % CUT_BYTES;
            }
            if (!room) {
                close_operation(planner);
                continue;
            }
            n = (uint32_t)(length < room ? length : room);
            if (n >= lba)
                n -= n % lba;
            uint32_t occupied = n < lba ? lba : n;
            struct bkv_part *part = part_for(planner, transfer, payload_offset, start);
            if (!part)
                return false;
            if (staged) {
                if (!add_staged(planner, occupied)
                    || !add_copy(planner, address, n, operation->staging_bytes - occupied, transfer))
                    return false;
            } else if (!add_direct(planner, address, n)) {
                return false;
            }
        }
        planner->partial_bytes = staged ? (planner->partial_bytes + n) % lba : 0;
        struct bkv_part *part = LAST(planner->parts, struct bkv_part);
        part->length_bytes += n;
        if (address) {
            part->payload_bytes += n;
            *(staged ? &planner->totals->bounced_bytes : &planner->totals->direct_bytes) += n;
            address += n;
        }
        payload_offset += n;
        offset += n;
        length -= n;
    }
    return true;
}

static bool add_slice(struct planner *planner, const struct bkv_slice *slice)
{
    const struct bkv_batch *batch = planner->batch;
    const struct bkv_transfer *transfer = &batch->transfers[slice->transfer];
    uint64_t at = slice->payload_offset, offset = slice->offset_bytes;
    uint64_t end = at + slice->length_bytes;
    uint64_t payload_end = end < transfer->payload_bytes ? end : transfer->payload_bytes;
    if (at < payload_end) {
        uint32_t segment = bkv_batch_segment_at(batch, transfer, at);
        for (uint64_t skip = at - batch->segment_starts[segment]; at < payload_end; segment++, skip = 0) {
            uint64_t n = batch->segments[segment].length_bytes - skip;
            if (n > payload_end - at)
                n = payload_end - at;
            if (!add_fragment(planner, slice->transfer, at, offset, batch->segments[segment].address + skip, n))
                return false;
            at += n;
            offset += n;
        }
    }
    return at == end || add_fragment(planner, slice->transfer, at, offset, 0, end - at);
}

static int by_offset(const void *left, const void *right)
{
    const struct bkv_slice *a = left, *b = right;
    if (a->offset_bytes != b->offset_bytes)
        return a->offset_bytes < b->offset_bytes ? -1 : 1;
    return (a->transfer > b->transfer) - (a->transfer < b->transfer);
}

static void sort_slices(struct bkv_batch *batch)
{
    for (uint32_t i = 1; i < batch->slice_count; i++)
        if (by_offset(&batch->slices[i - 1], &batch->slices[i]) > 0) {
            qsort(batch->slices, batch->slice_count, sizeof *batch->slices, by_offset);
            return;
        }
}

/* The vectors no longer move: hand out their items, which lie in the order of the operations. */
static void adopt(struct planner *planner)
{
    struct bkv_batch *batch = planner->batch;
    batch->operations = planner->operations.items;
    batch->operation_count = planner->operations.count;
    struct iovec *iov = batch->iovs = planner->iovs.items;
    struct bkv_part *part = batch->parts = planner->parts.items;
    struct bkv_copy *copy = batch->copies = planner->copies.items;
    struct bkv_range *range = batch->ranges = planner->ranges.items;
    for (uint32_t i = 0; i < batch->operation_count; i++) {
        struct bkv_operation *operation = &batch->operations[i];
        batch->operations_bytes += operation->length_bytes;
        operation->iovs = iov;
        operation->parts = part;
        operation->copies = copy;
        operation->ranges = range;
        iov += operation->iov_count;
        part += operation->part_count;
        if (operation->copy_count)
            copy += operation->copy_count;
        if (operation->range_count)
            range += operation->range_count;
    }
}

int bkv_plan(struct bkv_batch *batch, const struct bkv_options *options, uint32_t operation_bytes, bool stage_all,
             struct bkv_regions *regions, struct bkv_plan_totals *totals)
{
    struct planner planner = {
        .batch = batch,
        .options = options,
        .regions = regions,
        .totals = totals,
        .operation_bytes = operation_bytes,
        .stage_all = stage_all,
        .staging_alignment = options->memory_alignment_bytes > options->lba_bytes ? options->memory_alignment_bytes
                                                                                   : options->lba_bytes,
    };
    /* One piece of staging has as many pages as it is long: no need to count them. */
    if (stage_all && operation_bytes / PAGE_BYTES > options->max_segments)
        planner.operation_bytes = options->max_segments * PAGE_BYTES;
    sort_slices(batch);
    bool planned = true;
    pthread_rwlock_rdlock(&regions->lock);
    for (uint32_t i = 0; planned && i < batch->slice_count; i++)
        planned = add_slice(&planner, &batch->slices[i]);
    close_operation(&planner);
    pthread_rwlock_unlock(&regions->lock);
    if (planned) {
        adopt(&planner);
        return 0;
    }
    free(planner.operations.items);
    free(planner.iovs.items);
    free(planner.parts.items);
    free(planner.copies.items);
    free(planner.ranges.items);
    return -ENOMEM;
}
