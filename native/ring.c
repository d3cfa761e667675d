#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "batch.h"
#include "operation.h"

int bkv_ring_open(struct bkv_ring *ring, uint32_t entries, enum bkv_ring_kind kind, const char **step)
{
    uint32_t width = kind == BKV_RING_WIDE ? IORING_SETUP_SQE128 | IORING_SETUP_CQE32 : 0; /* 5.19 */
    /* Completions run on the thread when it asks for them (6.1); or at least without interrupting it (5.19). */
    static const uint32_t wanted[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int code = -EINVAL;
    *step = "io_uring_setup";
    for (unsigned i = kind == BKV_RING_SHARED; i < sizeof wanted / sizeof *wanted && code == -EINVAL; i++) {
        struct io_uring_params params = {.flags = wanted[i] | width};
        code = io_uring_queue_init_params(entries, &ring->uring, &params);
    }
    if (!code)
        (void)io_uring_ring_dontfork(&ring->uring);
    return code;
}

void bkv_ring_close(struct bkv_ring *ring)
{
    /* Closing tears the ring down in the background; the device must not stay open, nor memory pinned, until then. */
    (void)io_uring_unregister_files(&ring->uring);
    (void)io_uring_unregister_buffers(&ring->uring);
    io_uring_queue_exit(&ring->uring);
}

struct io_uring_sqe *bkv_ring_sqe(struct bkv_ring *ring)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    return sqe ? memset(sqe, 0, sizeof *sqe << !!(ring->uring.flags & IORING_SETUP_SQE128)) : NULL;
}

void bkv_ring_prepare(struct io_uring_sqe *sqe, struct bkv_operation *operation, const struct iovec *memory,
                      uint32_t count, bool fixed)
{
    bool read = operation->batch->direction == BKV_READ;
    if (count == 1) {
        sqe->opcode = read ? (fixed ? IORING_OP_READ_FIXED : IORING_OP_READ)
                           : (fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE);
        sqe->buf_index = fixed ? (uint16_t)operation->fixed_index : 0;
        sqe->addr = (uintptr_t)memory->iov_base;
        sqe->len = (uint32_t)memory->iov_len;
    } else {
        sqe->opcode = read ? IORING_OP_READV : IORING_OP_WRITEV;
        sqe->addr = (uintptr_t)memory;
        sqe->len = count;
    }
    sqe->off = operation->offset_bytes + operation->done_bytes;
    sqe->user_data = (uintptr_t)operation;
}

int bkv_ring_enter(struct bkv_ring *ring, uint32_t wait_count)
{
    int submitted = wait_count ? io_uring_submit_and_wait(&ring->uring, wait_count)
                               : io_uring_submit_and_get_events(&ring->uring);
    return submitted >= 0 || submitted == -EINTR || submitted == -ETIME ? 0 : submitted;
}

bool bkv_ring_is_forbidden(int code)
{
    return code == -EPERM || code == -EACCES || code == -ENOSYS;
}

bool bkv_ring_take_back(struct bkv_ring *ring, uint64_t *user_data)
{
    /* The kernel looks at the tail when it is entered, and it was not. */
    struct io_uring_sq *queue = &ring->uring.sq;
    if (*queue->ktail == *queue->khead)
        return false;
    unsigned last = *queue->ktail - 1;
    unsigned shift = !!(ring->uring.flags & IORING_SETUP_SQE128);
    *user_data = queue->sqes[(last & queue->ring_mask) << shift].user_data;
    *queue->ktail = queue->sqe_head = queue->sqe_tail = last;
    return true;
}

bool bkv_ring_next(struct bkv_ring *ring, uint64_t *user_data, int32_t *result)
{
    /* Not io_uring_peek_cqe: it may enter the kernel, which the reactor does itself, once for many. */
    unsigned head;
    struct io_uring_cqe *cqe;
    io_uring_for_each_cqe(&ring->uring, head, cqe)
    {
        *user_data = cqe->user_data;
        *result = cqe->res;
        io_uring_cq_advance(&ring->uring, 1);
        return true;
    }
    return false;
}

int bkv_ring_register_file(struct bkv_ring *ring, int fd, int lifeline_fd)
{
    int files[] = {fd, lifeline_fd};
    return io_uring_register_files(&ring->uring, files, lifeline_fd < 0 ? 1 : 2);
}

int bkv_ring_register_buffer_table(struct bkv_ring *ring, uint32_t count)
{
    return io_uring_register_buffers_sparse(&ring->uring, count);
}

int bkv_ring_set_buffer(struct bkv_ring *ring, uint32_t slot, const void *address, uint64_t length_bytes)
{
    struct iovec buffer = {(void *)(uintptr_t)address, length_bytes};
    __u64 tag = 0;
    int updated = io_uring_register_buffers_update_tag(&ring->uring, slot, &buffer, &tag, 1);
    return updated < 0 ? updated : 0;
}
