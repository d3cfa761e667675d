/* The io_uring of the reactor: liburing, and which of its features are asked for. Owned by one thread. */
#ifndef BKV_RING_H
#define BKV_RING_H

#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>

struct bkv_ring {
    struct io_uring uring;
};

/* 0, or a negative errno with `step` naming the call that was refused. The calling thread becomes the only one
 * that may submit. `wide`: entries have room for an NVMe command and its completion. */
int bkv_ring_open(struct bkv_ring *ring, uint32_t entries, bool wide, const char **step);
/* Nothing may be in flight that uses a registered file or buffer. */
void bkv_ring_close(struct bkv_ring *ring);

/* A zeroed entry, or NULL when the queue is full. */
struct io_uring_sqe *bkv_ring_sqe(struct bkv_ring *ring);

/* Submits everything prepared and waits for `wait_count` completions, or until a timeout fires. 0 or a negative
 * errno. */
int bkv_ring_enter(struct bkv_ring *ring, uint32_t wait_count);

bool bkv_ring_next(struct bkv_ring *ring, uint64_t *user_data, int32_t *result);

/* Register the device as file 0; make room for registered buffers; fill one entry of that table. */
int bkv_ring_register_file(struct bkv_ring *ring, int fd);
int bkv_ring_register_buffer_table(struct bkv_ring *ring, uint32_t count);
int bkv_ring_set_buffer(struct bkv_ring *ring, uint32_t slot, const void *address, uint64_t length_bytes);

#endif
