#include "batch.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checksum.h"

/* Arrays of a request are indexed with 32 bits. */
#define MAX_COUNT UINT32_MAX

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "Batch.add packs pairs of 32-bit fields into words");
_Static_assert(sizeof(struct bkv_transfer) == 6 * 8, "TRANSFER_FIELDS");
_Static_assert(offsetof(struct bkv_transfer, payload_bytes) == 0, "word 0");
_Static_assert(offsetof(struct bkv_transfer, first_extent) == 8, "word 1, low");
_Static_assert(offsetof(struct bkv_transfer, extent_count) == 12, "word 1, high");
_Static_assert(offsetof(struct bkv_transfer, first_segment) == 16, "word 2, low");
_Static_assert(offsetof(struct bkv_transfer, segment_count) == 20, "word 2, high");
_Static_assert(offsetof(struct bkv_transfer, first_leaf) == 24, "word 3, low");
_Static_assert(offsetof(struct bkv_transfer, leaf_count) == 28, "word 3, high");
_Static_assert(offsetof(struct bkv_transfer, leaf_bytes) == 32, "word 4");
_Static_assert(offsetof(struct bkv_transfer, result) == 40, "word 5, low");
_Static_assert(offsetof(struct bkv_transfer, flags) == 44, "word 5, high");
_Static_assert(sizeof(struct bkv_extent) == 16 && sizeof(struct bkv_segment) == 16, "pairs of words");

int bkv_refuse(struct bkv_failure *failure, int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    failure->code = code;
    vsnprintf(failure->message, sizeof failure->message, format, arguments);
    va_end(arguments);
    return code;
}

typedef unsigned long long ull;

static int check_extents(const struct bkv_request *request, const struct bkv_options *options, uint64_t t,
                         const struct bkv_transfer *transfer, struct bkv_slice *slices,
                         struct bkv_failure *failure)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < transfer->extent_count; i++) {
        struct bkv_extent extent = request->extents[(uint64_t)transfer->first_extent + i];
        if (extent.offset_bytes % BKV_UNIT_BYTES || extent.length_bytes % BKV_UNIT_BYTES || !extent.length_bytes)
            return bkv_refuse(failure, -EINVAL,
                              "transfer %llu: extent %u (offset %llu, %llu bytes) is not whole units of %d bytes",
                              (ull)t, i, (ull)extent.offset_bytes, (ull)extent.length_bytes, BKV_UNIT_BYTES);
        if (extent.offset_bytes > options->size_bytes
            || extent.length_bytes > options->size_bytes - extent.offset_bytes)
            return bkv_refuse(failure, -EINVAL,
                              "transfer %llu: extent %u (offset %llu, %llu bytes) passes the end of the device at %llu",
                              (ull)t, i, (ull)extent.offset_bytes, (ull)extent.length_bytes, (ull)options->size_bytes);
        slices[i] = (struct bkv_slice){
            .offset_bytes = extent.offset_bytes,
            .length_bytes = extent.length_bytes,
            .payload_offset = offset,
            .transfer = (uint32_t)t,
        };
        if (__builtin_add_overflow(offset, extent.length_bytes, &offset))
            return bkv_refuse(failure, -EINVAL, "transfer %llu: the extents together pass 2^64 bytes", (ull)t);
    }
    uint64_t tail = transfer->payload_bytes % BKV_UNIT_BYTES;
    if (offset < transfer->payload_bytes || offset - transfer->payload_bytes != (tail ? BKV_UNIT_BYTES - tail : 0))
        return bkv_refuse(failure, -EINVAL,
                          "transfer %llu: the extents hold %llu bytes, the payload of %llu needs %llu", (ull)t,
                          (ull)offset, (ull)transfer->payload_bytes,
                          (ull)(transfer->payload_bytes + (tail ? BKV_UNIT_BYTES - tail : 0)));
    return 0;
}

static int check_segments(const struct bkv_batch *batch, uint64_t t, const struct bkv_transfer *transfer,
                          struct bkv_failure *failure)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < transfer->segment_count; i++) {
        uint64_t at = (uint64_t)transfer->first_segment + i, end;
        struct bkv_segment segment = batch->segments[at];
        if (!segment.address || __builtin_add_overflow(segment.address, segment.length_bytes, &end))
            return bkv_refuse(failure, -EINVAL, "transfer %llu: segment %u (address %#llx, %llu bytes) is not memory",
                              (ull)t, i, (ull)segment.address, (ull)segment.length_bytes);
        batch->segment_starts[at] = offset;
        if (__builtin_add_overflow(offset, segment.length_bytes, &offset))
            return bkv_refuse(failure, -EINVAL, "transfer %llu: the segments together pass 2^64 bytes", (ull)t);
    }
    if (offset != transfer->payload_bytes)
        return bkv_refuse(failure, -EINVAL, "transfer %llu: the segments hold %llu bytes, the payload has %llu",
                          (ull)t, (ull)offset, (ull)transfer->payload_bytes);
    return 0;
}

static int check_ranges(const struct bkv_request *request, uint64_t t, const struct bkv_transfer *transfer,
                        struct bkv_failure *failure)
{
    const struct {
        const char *name;
        uint32_t first, count;
        uint64_t limit;
    } ranges[] = {
        {"extents", transfer->first_extent, transfer->extent_count, request->extent_count},
        {"segments", transfer->first_segment, transfer->segment_count, request->segment_count},
        {"leaves", transfer->first_leaf, transfer->leaf_count, request->leaf_count},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if ((uint64_t)ranges[i].first + ranges[i].count > ranges[i].limit)
            return bkv_refuse(failure, -EINVAL, "transfer %llu: %s %u + %u pass the end of the array at %llu", (ull)t,
                              ranges[i].name, ranges[i].first, ranges[i].count, (ull)ranges[i].limit);
    uint64_t leaves = transfer->leaf_bytes ? (transfer->payload_bytes / transfer->leaf_bytes
                                              + !!(transfer->payload_bytes % transfer->leaf_bytes))
                                           : 0;
    if (leaves != transfer->leaf_count)
        return bkv_refuse(failure, -EINVAL,
                          "transfer %llu: room for %u leaves, a payload of %llu bytes has %llu of %llu bytes", (ull)t,
                          transfer->leaf_count, (ull)transfer->payload_bytes, (ull)leaves, (ull)transfer->leaf_bytes);
    /* Keeps every later sum and product of payload offsets below 2^64. */
    if (transfer->payload_bytes >> 62)
        return bkv_refuse(failure, -EINVAL, "transfer %llu: a payload of %llu bytes", (ull)t,
                          (ull)transfer->payload_bytes);
    if (transfer->flags)
        return bkv_refuse(failure, -EINVAL, "transfer %llu: flags %#x are not known", (ull)t, transfer->flags);
    return 0;
}

static int check(struct bkv_batch *batch, const struct bkv_request *request, const struct bkv_options *options,
                 struct bkv_failure *failure)
{
    /* Transfers could name the same extents twice: the sum of their counts bounds the slices, not the array. */
    uint64_t slice_count = 0, leaf_count = 0;
    int code;
    for (uint64_t t = 0; t < request->transfer_count; t++) {
        const struct bkv_transfer *transfer = &batch->transfers[t];
        if ((code = check_ranges(request, t, transfer, failure)))
            return code;
        slice_count += transfer->extent_count;
        batch->leaf_bases[t] = leaf_count;
        leaf_count += transfer->leaf_count;
    }
    if (slice_count > MAX_COUNT || leaf_count > MAX_COUNT)
        return bkv_refuse(failure, -EINVAL, "%llu extents and %llu leaves: too many for one batch", (ull)slice_count,
                          (ull)leaf_count);
    batch->slices = calloc(slice_count ? slice_count : 1, sizeof *batch->slices);
    if (batch->direction == BKV_READ)
        batch->leaf_remaining = calloc(leaf_count ? leaf_count : 1, sizeof *batch->leaf_remaining);
    if (!batch->slices || (batch->direction == BKV_READ && !batch->leaf_remaining))
        return bkv_refuse(failure, -ENOMEM, "no memory for %llu extents", (ull)slice_count);
    batch->slice_count = 0;
    for (uint64_t t = 0; t < request->transfer_count; t++) {
        const struct bkv_transfer *transfer = &batch->transfers[t];
        if ((code = check_extents(request, options, t, transfer, batch->slices + batch->slice_count, failure))
            || (code = check_segments(batch, t, transfer, failure)))
            return code;
        batch->slice_count += transfer->extent_count;
        if (batch->direction == BKV_READ)
            for (uint32_t leaf = 0; leaf < transfer->leaf_count; leaf++) {
                uint64_t left = transfer->payload_bytes - leaf * transfer->leaf_bytes;
                atomic_init(&batch->leaf_remaining[batch->leaf_bases[t] + leaf],
                            left < transfer->leaf_bytes ? left : transfer->leaf_bytes);
            }
    }
    atomic_init(&batch->pending, leaf_count);
    return 0;
}

int bkv_batch_open(struct bkv_batch **opened, const struct bkv_request *request,
                   const struct bkv_options *options, struct bkv_failure *failure)
{
    if (request->direction > BKV_WRITE || request->priority >= BKV_PRIORITY_COUNT)
        return bkv_refuse(failure, -EINVAL, "direction %u, priority %u: not known", request->direction,
                          request->priority);
    if (request->placement >= BKV_PLACEMENT_COUNT)
        return bkv_refuse(failure, -EINVAL, "placement %u: not known", request->placement);
    if (request->transfer_count > MAX_COUNT || request->extent_count > MAX_COUNT
        || request->segment_count > MAX_COUNT || request->leaf_count > MAX_COUNT)
        return bkv_refuse(failure, -EINVAL, "%llu transfers, %llu extents, %llu segments: too many for one batch",
                          (ull)request->transfer_count, (ull)request->extent_count, (ull)request->segment_count);
    struct bkv_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return bkv_refuse(failure, -ENOMEM, "no memory for a batch");
    pthread_cond_init(&batch->done_cond, NULL);
    batch->direction = (enum bkv_direction)request->direction;
    batch->priority = (enum bkv_priority)request->priority;
    batch->placement = (enum bkv_placement)request->placement;
    batch->token = request->token;
    batch->deadline_ns = request->deadline_ns;
    batch->caller_transfers = request->transfers;
    batch->caller_leaves = request->leaf_values;
    batch->transfer_count = (uint32_t)request->transfer_count;
    size_t transfers = request->transfer_count + 1, segments = request->segment_count + 1;
    batch->transfers = calloc(transfers, sizeof *batch->transfers);
    batch->leaf_bases = calloc(transfers, sizeof *batch->leaf_bases);
    batch->results = calloc(transfers, sizeof *batch->results);
    batch->segments = calloc(segments, sizeof *batch->segments);
    batch->segment_starts = calloc(segments, sizeof *batch->segment_starts);
    int code;
    if (!batch->transfers || !batch->leaf_bases || !batch->results || !batch->segments || !batch->segment_starts) {
        code = bkv_refuse(failure, -ENOMEM, "no memory for %llu transfers", (ull)request->transfer_count);
    } else {
        if (request->transfer_count)
            memcpy(batch->transfers, request->transfers, request->transfer_count * sizeof *batch->transfers);
        if (request->segment_count)
            memcpy(batch->segments, request->segments, request->segment_count * sizeof *batch->segments);
        code = check(batch, request, options, failure);
    }
    if (code) {
        bkv_batch_free(batch);
        return code;
    }
    *opened = batch;
    return 0;
}

void bkv_batch_free(struct bkv_batch *batch)
{
    for (uint32_t i = 0; i < batch->operation_count; i++)
        free(batch->operations[i].resume);
    free(batch->transfers);
    free(batch->leaf_bases);
    free(batch->results);
    free(batch->segments);
    free(batch->segment_starts);
    free(batch->slices);
    free(batch->leaf_remaining);
    free(batch->leaf_with_copy);
    free(batch->operations);
    free(batch->iovs);
    free(batch->parts);
    free(batch->copies);
    free(batch->ranges);
    pthread_cond_destroy(&batch->done_cond);
    free(batch);
}

uint32_t bkv_batch_segment_at(const struct bkv_batch *batch, const struct bkv_transfer *transfer,
                              uint64_t payload_offset)
{
    uint32_t low = transfer->first_segment, high = low + transfer->segment_count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (batch->segment_starts[middle] <= payload_offset)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

void bkv_batch_fail(struct bkv_batch *batch, uint32_t transfer, int32_t result)
{
    int32_t none = 0;
    atomic_compare_exchange_strong(&batch->results[transfer], &none, result);
}

enum { PIECES_ON_STACK = 64 };

uint64_t bkv_batch_hash(struct bkv_batch *batch, uint32_t t, uint64_t leaf)
{
    const struct bkv_transfer *transfer = &batch->transfers[t];
    uint64_t from = leaf * transfer->leaf_bytes;
    uint64_t left = transfer->payload_bytes - from;
    uint64_t length = left < transfer->leaf_bytes ? left : transfer->leaf_bytes;
    uint32_t segment = bkv_batch_segment_at(batch, transfer, from);
    uint64_t skip = from - batch->segment_starts[segment];
    uint64_t *value = &batch->caller_leaves[(uint64_t)transfer->first_leaf + leaf];
    if (batch->segments[segment].length_bytes - skip >= length) {
        *value = bkv_checksum((const void *)(uintptr_t)(batch->segments[segment].address + skip), length);
        return length;
    }
    struct iovec on_stack[PIECES_ON_STACK], *pieces = on_stack;
    uint32_t last = bkv_batch_segment_at(batch, transfer, from + length - 1);
    uint64_t count = (uint64_t)last - segment + 1;
    if (count > PIECES_ON_STACK && !(pieces = malloc(count * sizeof *pieces))) {
        bkv_batch_fail(batch, t, -ENOMEM);
        return 0;
    }
    uint64_t remaining = length, i = 0;
    do {
        const struct bkv_segment *at = &batch->segments[segment + i];
        uint64_t n = at->length_bytes - skip < remaining ? at->length_bytes - skip : remaining;
        pieces[i] = (struct iovec){(void *)(uintptr_t)(at->address + skip), n};
        remaining -= n;
        skip = 0;
    } while (++i < count);
    *value = bkv_checksum_pieces(pieces, count);
    if (pieces != on_stack)
        free(pieces);
    return length;
}

uint64_t bkv_batch_leaf_from(const struct bkv_transfer *transfer, uint64_t payload_offset)
{
    return (payload_offset + transfer->leaf_bytes - 1) / transfer->leaf_bytes;
}

uint64_t bkv_batch_hash_all(struct bkv_batch *batch)
{
    uint64_t hashed_bytes = 0;
    for (uint32_t t = 0; t < batch->transfer_count; t++)
        for (uint32_t leaf = 0; leaf < batch->transfers[t].leaf_count; leaf++)
            hashed_bytes += bkv_batch_hash(batch, t, leaf);
    return hashed_bytes;
}

uint64_t bkv_batch_arrived(struct bkv_batch *batch, const struct bkv_part *part, uint64_t *hashed_bytes)
{
    const struct bkv_transfer *transfer = &batch->transfers[part->transfer];
    if (!transfer->leaf_bytes || !part->payload_bytes)
        return 0;
    uint64_t settled = 0, at = part->payload_offset, end = at + part->payload_bytes;
    while (at < end) {
        uint64_t leaf = at / transfer->leaf_bytes;
        uint64_t leaf_end = (leaf + 1) * transfer->leaf_bytes;
        uint64_t n = (leaf_end < end ? leaf_end : end) - at;
        _Atomic uint64_t *remaining = &batch->leaf_remaining[batch->leaf_bases[part->transfer] + leaf];
        /* acq_rel: whoever brings it to zero sees what every other thread copied for this leaf */
        if (atomic_fetch_sub_explicit(remaining, n, memory_order_acq_rel) == n) {
            if (!atomic_load_explicit(&batch->results[part->transfer], memory_order_relaxed))
                *hashed_bytes += bkv_batch_hash(batch, part->transfer, leaf);
            settled++;
        }
        at += n;
    }
    return settled;
}

bool bkv_batch_hash_at(struct bkv_batch *batch, const struct bkv_part *part, const void *bytes,
                       uint64_t *hashed_bytes)
{
    const struct bkv_transfer *transfer = &batch->transfers[part->transfer];
    if (!transfer->leaf_bytes || part->payload_offset % transfer->leaf_bytes)
        return false;
    uint64_t left = transfer->payload_bytes - part->payload_offset;
    if (part->payload_bytes != (left < transfer->leaf_bytes ? left : transfer->leaf_bytes))
        return false;
    uint64_t leaf = part->payload_offset / transfer->leaf_bytes;
    batch->caller_leaves[transfer->first_leaf + leaf] = bkv_checksum(bytes, part->payload_bytes);
    *hashed_bytes += part->payload_bytes;
    return true;
}

void bkv_batch_publish(struct bkv_batch *batch)
{
    for (uint32_t t = 0; t < batch->transfer_count; t++)
        batch->caller_transfers[t].result = atomic_load_explicit(&batch->results[t], memory_order_relaxed);
}
