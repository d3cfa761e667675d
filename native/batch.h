/* A batch in flight: private copies of what the caller described, the plan made of it, and what is pending. */
#ifndef BKV_BATCH_H
#define BKV_BATCH_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine.h"
#include "operation.h"

/* One extent of one transfer, in the order of the device once planned. */
struct bkv_slice {
    uint64_t offset_bytes, length_bytes;
    uint64_t payload_offset;
    uint32_t transfer;
};

struct bkv_batch {
    struct bkv_batch *next;                         /* in the inbox, a class queue, or the done list */
    struct bkv_batch *hash_next;                    /* in the workers' queue */
    struct bkv_batch *active_next, *active_previous; /* while operations of it are in the ring */
    enum bkv_direction direction;
    enum bkv_priority priority;
    enum bkv_placement placement;
    uint64_t token;
    uint64_t deadline_ns; /* 0: none */

    uint32_t transfer_count;
    struct bkv_transfer *transfers; /* private copies */
    struct bkv_segment *segments;
    struct bkv_slice *slices;
    uint32_t slice_count;
    uint64_t *segment_starts;        /* payload offset of each segment */
    uint64_t *leaf_bases;            /* per transfer, its first entry in leaf_remaining */
    _Atomic uint64_t *leaf_remaining; /* bytes not yet read; reads only */
    uint8_t *leaf_with_copy;          /* hashed by whoever copies it into staging; writes only, or NULL */
    uint64_t leaves_with_copy;
    _Atomic int32_t *results;
    struct bkv_transfer *caller_transfers;
    uint64_t *caller_leaves;

    struct bkv_operation *operations;
    struct iovec *iovs;
    struct bkv_part *parts;
    struct bkv_copy *copies;
    struct bkv_range *ranges;
    uint32_t operation_count;
    uint64_t operations_bytes; /* of all operations together */

    uint32_t next_operation; /* of the class queue's owner */
    uint32_t ring_count;     /* of the reactor */
    uint32_t hash_transfer;  /* of the workers' queue */
    uint64_t hash_leaf;

    uint64_t memory_bytes; /* of the segments that are used */
    bool on_lane;
    _Atomic uint64_t pending; /* operations, leaves, and the submitter while it is in submit */
    bool done;                /* under the engine's done mutex */
    pthread_cond_t done_cond;
};

/* Fills in why a call fails; returns `code`. */
__attribute__((format(printf, 3, 4)))
int bkv_refuse(struct bkv_failure *failure, int code, const char *format, ...);

/* Copies and checks a request. 0, or a negative errno with `failure` filled in. */
int bkv_batch_open(struct bkv_batch **batch, const struct bkv_request *request,
                   const struct bkv_options *options, struct bkv_failure *failure);
void bkv_batch_free(struct bkv_batch *batch);

/* Position of the segment that holds payload byte `payload_offset` of a transfer. */
uint32_t bkv_batch_segment_at(const struct bkv_batch *batch, const struct bkv_transfer *transfer,
                              uint64_t payload_offset);

void bkv_batch_fail(struct bkv_batch *batch, uint32_t transfer, int32_t result);

/* Computes one leaf into the caller's array; returns the bytes hashed. */
uint64_t bkv_batch_hash(struct bkv_batch *batch, uint32_t transfer, uint64_t leaf);

/* The first leaf of a transfer that begins at `payload_offset` or behind it. */
uint64_t bkv_batch_leaf_from(const struct bkv_transfer *transfer, uint64_t payload_offset);

/* Computes every leaf; returns the bytes hashed. */
uint64_t bkv_batch_hash_all(struct bkv_batch *batch);

/* Accounts for one part that has arrived: hashes the leaves it completes. Returns how many leaves are settled,
 * and adds the bytes hashed. */
uint64_t bkv_batch_arrived(struct bkv_batch *batch, const struct bkv_part *part, uint64_t *hashed_bytes);

/* The same for a part that is one leaf as a whole, which is hashed where its bytes lie now. False: it is not. */
bool bkv_batch_hash_at(struct bkv_batch *batch, const struct bkv_part *part, const void *bytes,
                       uint64_t *hashed_bytes);

/* Copies the results to the caller's array. */
void bkv_batch_publish(struct bkv_batch *batch);

#endif
