#include "operation.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "batch.h"
#include "checksum.h"
#include "cipher.h"
#include "internal.h"

/* EAGAIN and EINTR say nothing about the device; but an answer that never changes is one. */
enum { MAX_ATTEMPTS = 1000 };

/* Less than this may well be read before it would have left the caches. */
enum { STREAM_BYTES = 65536 };

void bkv_list_push(struct bkv_operation_list *list, struct bkv_operation *operation)
{
    operation->next = NULL;
    if (list->last)
        list->last->next = operation;
    else
        list->first = operation;
    list->last = operation;
    list->count++;
}

struct bkv_operation *bkv_list_pop(struct bkv_operation_list *list)
{
    struct bkv_operation *operation = list->first;
    if (operation) {
        list->first = operation->next;
        if (!list->first)
            list->last = NULL;
        list->count--;
    }
    return operation;
}

void bkv_list_append(struct bkv_operation_list *list, struct bkv_operation_list *tail)
{
    if (!tail->first)
        return;
    if (list->last)
        list->last->next = tail->first;
    else
        list->first = tail->first;
    list->last = tail->last;
    list->count += tail->count;
    *tail = (struct bkv_operation_list){0};
}

const struct iovec *bkv_operation_memory(const struct bkv_operation *operation, uint32_t *count)
{
    if (operation->done_bytes) {
        *count = operation->resume_count;
        return operation->resume;
    }
    *count = operation->iov_count;
    return operation->iovs;
}

/* The memory of bytes [from, from + length) of an operation; `out` has room for all of its iovecs. */
static uint32_t slice_memory(const struct bkv_operation *operation, uint32_t from, uint32_t length, struct iovec *out)
{
    uint32_t count = 0, start = 0;
    for (uint32_t i = 0; i < operation->iov_count && length; i++) {
        const struct iovec *iov = &operation->iovs[i];
        uint32_t end = start + (uint32_t)iov->iov_len;
        if (from < end) {
            uint32_t n = end - from < length ? end - from : length;
            out[count++] = (struct iovec){(char *)iov->iov_base + (from - start), n};
            from += n;
            length -= n;
        }
        start = end;
    }
    return count;
}

void bkv_operation_attach_staging(struct bkv_operation *operation, uint8_t *staging)
{
    operation->staging = staging;
    for (uint32_t i = 0; i < operation->range_count; i++)
        operation->iovs[operation->ranges[i].iov].iov_base = staging + operation->ranges[i].staging_offset;
}

/* The copies of one part, and whether its payload is one of them as a whole. */
struct part_copies {
    const struct bkv_part *part;
    const struct bkv_copy *first, *end;
    const struct bkv_copy *whole;
};

/* Those of the next part; false at the end. Begin with a zeroed one. */
static bool next_part(const struct bkv_operation *operation, struct part_copies *copies)
{
    copies->part = copies->part ? copies->part + 1 : operation->parts;
    if (copies->part == operation->parts + operation->part_count)
        return false;
    const struct bkv_copy *last = operation->copies + operation->copy_count;
    copies->first = copies->end ? copies->end : operation->copies;
    copies->whole = NULL;
    for (copies->end = copies->first; copies->end < last && copies->end->part == copies->part - operation->parts;
         copies->end++)
        if (copies->end->address && copies->end->length_bytes == copies->part->payload_bytes)
            copies->whole = copies->end;
    return true;
}

/* Where a piece that begins at `from` ends: with its leaf, or with the part. */
static uint64_t piece_end(const struct bkv_transfer *transfer, const struct bkv_part *part, uint64_t from)
{
    uint64_t end = part->payload_offset + part->payload_bytes;
    uint64_t leaf_end = transfer->leaf_bytes ? (from / transfer->leaf_bytes + 1) * transfer->leaf_bytes : end;
    return leaf_end < end ? leaf_end : end;
}

/* Whether the piece is a leaf, and hashed with its copy. */
static bool is_marked(const struct bkv_batch *batch, const struct bkv_part *part, uint64_t from)
{
    const struct bkv_transfer *transfer = &batch->transfers[part->transfer];
    return batch->leaf_with_copy && transfer->leaf_bytes && from % transfer->leaf_bytes == 0
           && batch->leaf_with_copy[batch->leaf_bases[part->transfer] + from / transfer->leaf_bytes];
}

uint64_t bkv_operation_mark_leaves(struct bkv_operation *operation)
{
    struct bkv_batch *batch = operation->batch;
    uint64_t marked = 0;
    for (struct part_copies copies = {0}; next_part(operation, &copies);) {
        const struct bkv_transfer *transfer = &batch->transfers[copies.part->transfer];
        uint64_t end = copies.part->payload_offset + copies.part->payload_bytes;
        if (!copies.whole || !transfer->leaf_bytes)
            continue;
        for (uint64_t leaf = bkv_batch_leaf_from(transfer, copies.part->payload_offset);
             leaf * transfer->leaf_bytes < end
             && (end == transfer->payload_bytes || (leaf + 1) * transfer->leaf_bytes <= end);
             leaf++, marked++)
            batch->leaf_with_copy[batch->leaf_bases[copies.part->transfer] + leaf] = 1;
    }
    return marked;
}

/* Where the first byte of a piece of a part's payload lies on the device. */
static uint64_t device_offset(const struct bkv_operation *operation, const struct bkv_part *part, uint64_t at)
{
    return operation->offset_bytes + part->start_bytes + (at - part->payload_offset);
}

/* Whether the cipher takes the pieces of a part one by one, from or to where the caller has them: all of them are whole
 * units. Staging then holds nothing but ciphertext. */
static bool is_piecewise(const struct bkv_engine *engine, const struct bkv_operation *operation,
                         const struct part_copies *copies)
{
    const struct bkv_transfer *transfer = &operation->batch->transfers[copies->part->transfer];
    return engine->cipher && copies->whole && copies->part->payload_bytes % BKV_UNIT_BYTES == 0
           && transfer->leaf_bytes % BKV_UNIT_BYTES == 0;
}

/* Encrypts to staging what is to be written; what cannot be encrypted is not written as it is. */
static void encrypt(struct bkv_engine *engine, struct bkv_operation *operation, const struct bkv_part *part,
                    uint64_t at, const uint8_t *from, uint64_t length_bytes)
{
    uint8_t *to = operation->staging + part->start_bytes + (at - part->payload_offset);
    uint64_t offset_bytes = device_offset(operation, part, at);
    if (bkv_cipher_encrypt(engine->cipher, offset_bytes, to, from, (uint32_t)length_bytes))
        return;
    memset(to, 0, length_bytes);
    bkv_batch_fail(operation->batch, part->transfer, -EIO);
}

/* Decrypts from staging what has arrived. False: it did not, now. */
static bool decrypt(struct bkv_engine *engine, struct bkv_operation *operation, const struct bkv_part *part,
                    uint64_t at, uint8_t *to, uint64_t length_bytes)
{
    const uint8_t *from = operation->staging + part->start_bytes + (at - part->payload_offset);
    if (bkv_cipher_decrypt(engine->cipher, device_offset(operation, part, at), to, from, (uint32_t)length_bytes))
        return true;
    bkv_batch_fail(operation->batch, part->transfer, -EIO);
    return false;
}

void bkv_operation_copy_in(struct bkv_engine *engine, struct bkv_operation *operation)
{
    struct bkv_batch *batch = operation->batch;
    uint64_t settled = 0, hashed_bytes = 0;
    for (struct part_copies copies = {0}; next_part(operation, &copies);) {
        const struct bkv_transfer *transfer = &batch->transfers[copies.part->transfer];
        bool piecewise = is_piecewise(engine, operation, &copies);
        for (const struct bkv_copy *copy = copies.first; copy < copies.end; copy++) {
            uint8_t *target = operation->staging + copy->staging_offset;
            if (!copy->address) {
                memset(target, 0, copy->length_bytes);
                continue;
            }
            if (copy != copies.whole) {
                memcpy(target, copy->address, copy->length_bytes);
                continue;
            }
            uint64_t start = copies.part->payload_offset, end = start + copies.part->payload_bytes;
            for (uint64_t at = start, stop; at < end; at = stop) {
                stop = piece_end(transfer, copies.part, at);
                if (piecewise)
                    encrypt(engine, operation, copies.part, at, copy->address + (at - start), stop - at);
                else
                    memcpy(target + (at - start), copy->address + (at - start), stop - at);
                if (is_marked(batch, copies.part, at)) {
                    hashed_bytes += bkv_batch_hash(batch, copies.part->transfer, at / transfer->leaf_bytes);
                    settled++;
                }
            }
        }
        if (engine->cipher && !piecewise)
            encrypt(engine, operation, copies.part, copies.part->payload_offset,
                    operation->staging + copies.part->start_bytes, copies.part->length_bytes);
    }
    bkv_count(&engine->counts.hashed_bytes, hashed_bytes);
    if (settled)
        bkv_engine_release(engine, batch, settled);
}

static void copy_out(uint8_t *target, const uint8_t *source, uint64_t length_bytes)
{
    if (length_bytes >= STREAM_BYTES)
        bkv_stream(target, source, length_bytes);
    else
        memcpy(target, source, length_bytes);
}

uint64_t bkv_operation_arrived(struct bkv_engine *engine, struct bkv_operation *operation, uint64_t *hashed_bytes)
{
    struct bkv_batch *batch = operation->batch;
    uint64_t settled = 0;
    for (struct part_copies copies = {0}; next_part(operation, &copies);) {
        const struct bkv_transfer *transfer = &batch->transfers[copies.part->transfer];
        bool piecewise = is_piecewise(engine, operation, &copies);
        if (engine->cipher && !piecewise && !copies.part->result
            && !decrypt(engine, operation, copies.part, copies.part->payload_offset,
                        operation->staging + copies.part->start_bytes, copies.part->length_bytes))
            operation->parts[copies.part - operation->parts].result = -EIO;
        /* After a failure the slot still holds what somebody else staged there. */
        if (copies.whole && !copies.part->result) {
            uint64_t start = copies.part->payload_offset, end = start + copies.part->payload_bytes;
            const uint8_t *source = operation->staging + copies.whole->staging_offset;
            for (uint64_t at = start, stop; at < end; at = stop) {
                stop = piece_end(transfer, copies.part, at);
                struct bkv_part piece = *copies.part;
                piece.payload_offset = at;
                piece.payload_bytes = (uint32_t)(stop - at);
                if (piecewise) {
                    uint8_t *target = copies.whole->address + (at - start);
                    bool arrived = decrypt(engine, operation, copies.part, at, target, stop - at);
                    bool hashed = arrived && bkv_batch_hash_at(batch, &piece, target, hashed_bytes);
                    settled += hashed ? 1 : bkv_batch_arrived(batch, &piece, hashed_bytes);
                    continue;
                }
                /* A whole leaf is hashed where it is still in a cache, and the copy leaves the caches to the next. */
                bool hashed = bkv_batch_hash_at(batch, &piece, source + (at - start), hashed_bytes);
                copy_out(copies.whole->address + (at - start), source + (at - start), stop - at);
                settled += hashed ? 1 : bkv_batch_arrived(batch, &piece, hashed_bytes);
            }
            continue;
        }
        for (const struct bkv_copy *copy = copies.first; copy < copies.end; copy++)
            if (copy->address && !copies.part->result)
                memcpy(copy->address, operation->staging + copy->staging_offset, copy->length_bytes);
        settled += bkv_batch_arrived(batch, copies.part, hashed_bytes);
    }
    return settled;
}

static void set_results(struct bkv_operation *operation, int32_t result)
{
    for (uint32_t i = 0; i < operation->part_count; i++)
        operation->parts[i].result = result;
}

void bkv_operation_refuse(struct bkv_engine *engine, struct bkv_operation *operation, int32_t result)
{
    struct bkv_batch *batch = operation->batch;
    uint64_t settled = 0;
    for (struct part_copies copies = {0}; next_part(operation, &copies);) {
        const struct bkv_transfer *transfer = &batch->transfers[copies.part->transfer];
        uint64_t at = copies.part->payload_offset, end = at + copies.part->payload_bytes;
        for (; copies.whole && at < end; at = piece_end(transfer, copies.part, at))
            settled += is_marked(batch, copies.part, at);
    }
    set_results(operation, result);
    if (settled)
        bkv_engine_release(engine, batch, settled);
}

/* One operation per part, so that an error lands only on the transfer whose LBAs are bad. */
static bool isolate(struct bkv_operation *operation, struct bkv_operation_list *again)
{
    struct bkv_operation_list children = {0};
    for (uint32_t i = 0; i < operation->part_count; i++) {
        struct bkv_operation *child = calloc(1, sizeof *child + operation->iov_count * sizeof(struct iovec));
        if (!child) {
            while ((child = bkv_list_pop(&children)))
                free(child);
            return false;
        }
        const struct bkv_part *part = &operation->parts[i];
        child->parent = operation;
        child->parent_part = i;
        child->batch = operation->batch;
        child->offset_bytes = operation->offset_bytes + part->start_bytes;
        child->length_bytes = part->length_bytes;
        child->iovs = (struct iovec *)(child + 1);
        child->iov_count = slice_memory(operation, part->start_bytes, part->length_bytes, child->iovs);
        child->fixed_index = operation->fixed_index;
        bkv_list_push(&children, child);
    }
    operation->children = children.count;
    bkv_list_append(again, &children);
    return true;
}

/* Prepares the rest of a short transfer. False when not one more LBA moved. */
static bool resume(struct bkv_engine *engine, struct bkv_operation *operation, uint32_t moved)
{
    uint32_t lba = engine->options.lba_bytes;
    moved -= moved % lba;
    if (!moved)
        return false;
    if (!operation->resume && !(operation->resume = calloc(operation->iov_count, sizeof *operation->resume)))
        return false;
    operation->done_bytes += moved;
    operation->resume_count = slice_memory(operation, operation->done_bytes,
                                           operation->length_bytes - operation->done_bytes, operation->resume);
    return true;
}

bool bkv_device_is_gone(int fd)
{
    return lseek(fd, 0, SEEK_END) == 0;
}

struct bkv_operation *bkv_operation_settle(struct bkv_engine *engine, struct bkv_operation *operation,
                                           int32_t answer, struct bkv_operation_list *again)
{
    struct bkv_counts *counts = &engine->counts;
    bool read = operation->batch->direction == BKV_READ;
    if ((answer == -EAGAIN || answer == -EINTR) && operation->attempts++ < MAX_ATTEMPTS) {
        bkv_count(&counts->resubmitted, 1);
        bkv_list_push(again, operation);
        return NULL;
    }
    if (answer > 0) {
        bkv_count(read ? &counts->device_read_bytes : &counts->device_write_bytes, (uint32_t)answer);
        if (!read)
            bkv_count(&counts->placed_bytes[operation->batch->placement], (uint32_t)answer);
        if ((uint32_t)answer == operation->length_bytes - operation->done_bytes) {
            answer = 0;
            goto finish;
        }
        bkv_count(&counts->short_transfers, 1);
        if (resume(engine, operation, (uint32_t)answer)) {
            bkv_count(&counts->resubmitted, 1);
            bkv_list_push(again, operation);
            return NULL;
        }
        answer = 0;
    }
    if (!answer)
        answer = read ? -ENODEV : -EIO; /* inside the device, only a namespace that went away reads as nothing */
    if (answer == -ENOSPC && bkv_device_is_gone(engine->options.fd))
        answer = -ENODEV; /* a write finds no space where there is no size */
    if (operation->transfer_count > 1 && isolate(operation, again)) {
        bkv_count(&counts->isolated_requests, operation->part_count);
        return NULL;
    }
finish:
    if (operation->parent) {
        struct bkv_operation *parent = operation->parent;
        parent->parts[operation->parent_part].result = answer;
        free(operation->resume);
        free(operation);
        return --parent->children ? NULL : parent;
    }
    set_results(operation, answer);
    return operation;
}
