#include "operation.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "batch.h"
#include "internal.h"

/* EAGAIN and EINTR say nothing about the device; but an answer that never changes is one. */
enum { MAX_ATTEMPTS = 1000 };

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

void bkv_operation_copy_in(struct bkv_operation *operation)
{
    for (uint32_t i = 0; i < operation->copy_count; i++) {
        const struct bkv_copy *copy = &operation->copies[i];
        if (copy->address)
            memcpy(operation->staging + copy->staging_offset, copy->address, copy->length_bytes);
        else
            memset(operation->staging + copy->staging_offset, 0, copy->length_bytes);
    }
}

void bkv_operation_copy_out(struct bkv_operation *operation)
{
    for (uint32_t i = 0; i < operation->copy_count; i++) {
        const struct bkv_copy *copy = &operation->copies[i];
        /* After a failure the slot still holds what somebody else staged there. */
        if (copy->address && !operation->parts[copy->part].result)
            memcpy(copy->address, operation->staging + copy->staging_offset, copy->length_bytes);
    }
}

void bkv_operation_refuse(struct bkv_operation *operation, int32_t result)
{
    for (uint32_t i = 0; i < operation->part_count; i++)
        operation->parts[i].result = result;
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
    bkv_operation_refuse(operation, answer);
    return operation;
}
