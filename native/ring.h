/* The part of the io_uring interface the reactor uses, straight on the system calls.
 *
 * Not liburing: the reactor needs the minimum-wait argument (Linux 6.12), which the liburing of current
 * distributions does not pass, and counts its enters; what remains is too small to be worth a shared library on
 * every machine. Owned by one thread.
 */
#ifndef BKV_RING_H
#define BKV_RING_H

#include <linux/io_uring.h>
#include <stdbool.h>
#include <stdint.h>

/* Newer than the kernel headers of current distributions. */
#ifndef IORING_FEAT_MIN_TIMEOUT
#define IORING_FEAT_MIN_TIMEOUT (1U << 15)
#endif

struct bkv_ring {
    int fd;
    uint32_t features;
    uint32_t setup_flags;
    void *queues;
    uint64_t queues_bytes;
    struct io_uring_sqe *sqes;
    uint64_t sqes_bytes;
    uint32_t *sq_head, *sq_tail, sq_mask, sq_entries, sq_local_tail;
    uint32_t *cq_head, *cq_tail, cq_mask;
    struct io_uring_cqe *cqes;
};

/* 0, or a negative errno with `step` naming the call that was refused. The calling thread becomes the only one
 * that may submit. */
int bkv_ring_open(struct bkv_ring *ring, uint32_t entries, const char **step);
void bkv_ring_close(struct bkv_ring *ring);

/* A zeroed entry, or NULL when the queue is full. */
struct io_uring_sqe *bkv_ring_sqe(struct bkv_ring *ring);
uint32_t bkv_ring_unsubmitted(const struct bkv_ring *ring);

/* Submits everything prepared and waits for `wait_count` completions; once `minimum_us` have passed, for one.
 * Where the kernel cannot do that it returns after `minimum_us` with whatever there is. 0 or a negative errno;
 * ETIME and EINTR are not errors. */
int bkv_ring_enter(struct bkv_ring *ring, uint32_t wait_count, uint32_t minimum_us);

bool bkv_ring_next(struct bkv_ring *ring, uint64_t *user_data, int32_t *result);

/* Register the device as file 0; make room for registered buffers; fill one entry of that table. */
int bkv_ring_register_file(struct bkv_ring *ring, int fd);
int bkv_ring_register_buffer_table(struct bkv_ring *ring, uint32_t count);
int bkv_ring_set_buffer(struct bkv_ring *ring, uint32_t slot, const void *address, uint64_t length_bytes);

#endif
