/* An io_uring: liburing, and which of its features are asked for. Used by one thread at a time. */
#ifndef BKV_RING_H
#define BKV_RING_H

#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>

struct bkv_operation;

struct bkv_ring {
    struct io_uring uring;
};

enum bkv_ring_kind {
    BKV_RING_OWNED,  /* the thread that opens it is the only one that ever submits */
    BKV_RING_WIDE,   /* the same, and entries have room for an NVMe command and its completion */
    BKV_RING_SHARED, /* threads take turns */
};

/* 0, or a negative errno with `step` naming the call that was refused. */
int bkv_ring_open(struct bkv_ring *ring, uint32_t entries, enum bkv_ring_kind kind, const char **step);
/* Nothing may be in flight that uses a registered file or buffer. */
void bkv_ring_close(struct bkv_ring *ring);

/* A zeroed entry, or NULL when the queue is full. */
struct io_uring_sqe *bkv_ring_sqe(struct bkv_ring *ring);

/* Fills in a zeroed entry, except for its file and flags: an operation as a read or write of the block device or file.
 * `memory` and `count` are bkv_operation_memory's; `fixed`: the one iovec is registered, as entry `fixed_index`. */
void bkv_ring_prepare(struct io_uring_sqe *sqe, struct bkv_operation *operation, const struct iovec *memory,
                      uint32_t count, bool fixed);

/* Submits everything prepared and waits for `wait_count` completions, or until a timeout fires. 0 or a negative
 * errno. */
int bkv_ring_enter(struct bkv_ring *ring, uint32_t wait_count);

/* Whether a negative errno of bkv_ring_enter says that this thread may not enter any more: a seccomp filter. */
bool bkv_ring_is_forbidden(int code);

/* Takes back the latest entry that the kernel has not got. False: there is none. */
bool bkv_ring_take_back(struct bkv_ring *ring, uint64_t *user_data);

bool bkv_ring_next(struct bkv_ring *ring, uint64_t *user_data, int32_t *result);

/* Register the device as file 0; make room for registered buffers; fill one entry of that table.
 *
 * A `lifeline_fd` that is not -1 becomes file 1, which no request uses. The kernel lets registered files go when it has
 * taken the ring down, after the last request has completed. So whoever sees that every copy of the lifeline is closed
 * knows that nothing is in flight any more, also where the process was killed. Requests hold only their own file. */
int bkv_ring_register_file(struct bkv_ring *ring, int fd, int lifeline_fd);
int bkv_ring_register_buffer_table(struct bkv_ring *ring, uint32_t count);
int bkv_ring_set_buffer(struct bkv_ring *ring, uint32_t slot, const void *address, uint64_t length_bytes);

#endif
