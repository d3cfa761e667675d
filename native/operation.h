/* One operation: one request to the device, at most `max_transfer_bytes` long, contiguous on the device.
 *
 * An operation may carry parts of several transfers (neighbours on the device are coalesced). Memory
 * the device cannot reach directly (misaligned, or shorter than an LBA) is replaced by ranges of a staging slot;
 * `copies` says which bytes go where. The rest of the same operation stays direct.
 */
#ifndef BKV_OPERATION_H
#define BKV_OPERATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct bkv_batch;
struct bkv_engine;

/* The share of one transfer in one operation. */
struct bkv_part {
    uint64_t payload_offset;
    uint32_t payload_bytes; /* length_bytes less the padding */
    uint32_t length_bytes;
    uint32_t start_bytes; /* from the start of the operation */
    uint32_t transfer;
    int32_t result;
};

/* Bytes that move between caller's memory and the staging slot. NULL address: padding (zeros when written,
 * dropped when read). */
struct bkv_copy {
    uint8_t *address;
    uint32_t length_bytes;
    uint32_t staging_offset;
    uint32_t part;
};

/* An iovec whose memory is `staging_offset` bytes into the staging slot. */
struct bkv_range {
    uint32_t iov;
    uint32_t staging_offset;
};

struct bkv_operation {
    struct bkv_operation *next;
    struct bkv_operation *parent; /* of an operation that carries one part of a failed coalesced one */
    struct bkv_batch *batch;
    uint64_t offset_bytes;
    uint32_t length_bytes;
    uint32_t done_bytes;
    struct iovec *iovs;
    struct bkv_part *parts;
    struct bkv_copy *copies;
    struct bkv_range *ranges;
    uint32_t iov_count, part_count, copy_count, range_count;
    uint32_t transfer_count; /* distinct transfers among the parts */
    uint32_t staging_bytes;  /* 0: no staging needed */
    uint8_t *staging;
    struct iovec *resume; /* what is left of `iovs` after a short transfer */
    uint32_t resume_count;
    bool wants_fixed;    /* its only iovec could lie in registered memory */
    int32_t fixed_index; /* of the registered region that holds the only iovec, or -1 */
    uint32_t attempts;
    uint32_t children; /* isolating operations not yet finished */
    uint32_t parent_part;
};

struct bkv_operation_list {
    struct bkv_operation *first, *last;
    uint32_t count;
};

void bkv_list_push(struct bkv_operation_list *list, struct bkv_operation *operation);
struct bkv_operation *bkv_list_pop(struct bkv_operation_list *list);
void bkv_list_append(struct bkv_operation_list *list, struct bkv_operation_list *tail);

/* The memory for the next request: all of it, or what is left after a short transfer. */
const struct iovec *bkv_operation_memory(const struct bkv_operation *operation, uint32_t *count);

void bkv_operation_attach_staging(struct bkv_operation *operation, uint8_t *staging);
/* Copies to the staging slot; the leaves that `bkv_operation_mark_leaves` marked are hashed on the way, while they are
 * in a cache. Then encrypts what is there, if the engine does that. */
void bkv_operation_copy_in(struct bkv_engine *engine, struct bkv_operation *operation);
/* Decrypts what arrived, copies it from the staging slot, and accounts for it as bkv_batch_arrived does. */
uint64_t bkv_operation_arrived(struct bkv_engine *engine, struct bkv_operation *operation, uint64_t *hashed_bytes);

/* Marks the leaves that lie in the operation whole and will be copied in one piece. Returns how many. */
uint64_t bkv_operation_mark_leaves(struct bkv_operation *operation);

/* Whether the block device has no size any more: its namespace went away. */
bool bkv_device_is_gone(int fd);

/* Ends an operation that the device never got, nor the staging: its parts hold `result`. */
void bkv_operation_refuse(struct bkv_engine *engine, struct bkv_operation *operation, int32_t result);

/* Judges what the device answered (bytes moved, or a negative errno). Returns the operation to finish, whose parts
 * then hold their results, or NULL with what to issue next appended to `again`. */
struct bkv_operation *bkv_operation_settle(struct bkv_engine *engine, struct bkv_operation *operation,
                                           int32_t answer, struct bkv_operation_list *again);

#endif
