#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int setup(uint32_t entries, struct io_uring_params *params)
{
    /* Completions run on the reactor when it asks for them (6.1); or at least without interrupting it (5.19). */
    static const uint32_t wanted[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int fd = -1;
    for (unsigned i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        memset(params, 0, sizeof *params);
        params->flags = wanted[i];
        fd = (int)syscall(SYS_io_uring_setup, entries, params);
        if (fd >= 0 || errno != EINVAL)
            break;
    }
    return fd >= 0 ? fd : -errno;
}

int bkv_ring_open(struct bkv_ring *ring, uint32_t entries, const char **step)
{
    struct io_uring_params params;
    memset(ring, 0, sizeof *ring);
    *step = "io_uring_setup";
    ring->fd = setup(entries, &params);
    if (ring->fd < 0)
        return ring->fd;
    ring->features = params.features;
    ring->setup_flags = params.flags;
    /* the youngest of what is needed here */
    if (!(params.features & IORING_FEAT_FAST_POLL)) {
        *step = "io_uring of Linux before 5.7";
        close(ring->fd);
        return -EOPNOTSUPP;
    }
    uint64_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    uint64_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    ring->queues_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    *step = "mmap of the ring";
    char *queues = mmap(NULL, ring->queues_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                        IORING_OFF_SQ_RING);
    if (queues == MAP_FAILED) {
        int code = -errno;
        close(ring->fd);
        return code;
    }
    ring->queues = queues;
    void *sqes = mmap(NULL, ring->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                      IORING_OFF_SQES);
    if (sqes == MAP_FAILED) {
        int code = -errno;
        munmap(queues, ring->queues_bytes);
        close(ring->fd);
        return code;
    }
    ring->sqes = sqes;
    (void)madvise(queues, ring->queues_bytes, MADV_DONTFORK);
    (void)madvise(sqes, ring->sqes_bytes, MADV_DONTFORK);
    ring->sq_head = (uint32_t *)(queues + params.sq_off.head);
    ring->sq_tail = (uint32_t *)(queues + params.sq_off.tail);
    ring->sq_mask = *(uint32_t *)(queues + params.sq_off.ring_mask);
    ring->sq_entries = params.sq_entries;
    ring->cq_head = (uint32_t *)(queues + params.cq_off.head);
    ring->cq_tail = (uint32_t *)(queues + params.cq_off.tail);
    ring->cq_mask = *(uint32_t *)(queues + params.cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(queues + params.cq_off.cqes);
    uint32_t *array = (uint32_t *)(queues + params.sq_off.array);
    for (uint32_t i = 0; i < params.sq_entries; i++)
        array[i] = i;
    return 0;
}

uint32_t bkv_ring_unsubmitted(const struct bkv_ring *ring)
{
    return ring->sq_local_tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
}

struct io_uring_sqe *bkv_ring_sqe(struct bkv_ring *ring)
{
    if (bkv_ring_unsubmitted(ring) == ring->sq_entries)
        return NULL;
    struct io_uring_sqe *sqe = &ring->sqes[ring->sq_local_tail++ & ring->sq_mask];
    return memset(sqe, 0, sizeof *sqe);
}

int bkv_ring_enter(struct bkv_ring *ring, uint32_t wait_count)
{
    uint32_t submit = bkv_ring_unsubmitted(ring);
    __atomic_store_n(ring->sq_tail, ring->sq_local_tail, __ATOMIC_RELEASE);
    long entered = syscall(SYS_io_uring_enter, ring->fd, submit, wait_count, IORING_ENTER_GETEVENTS, NULL, 0);
    return entered >= 0 || errno == EINTR || errno == ETIME ? 0 : -errno;
}

bool bkv_ring_next(struct bkv_ring *ring, uint64_t *user_data, int32_t *result)
{
    uint32_t head = *ring->cq_head; /* written by this thread only */
    if (head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE))
        return false;
    const struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
    *user_data = cqe->user_data;
    *result = cqe->res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return true;
}

static int register_resource(struct bkv_ring *ring, uint32_t opcode, const void *argument, uint32_t count)
{
    return syscall(SYS_io_uring_register, ring->fd, opcode, argument, count) < 0 ? -errno : 0;
}

void bkv_ring_close(struct bkv_ring *ring)
{
    /* Closing tears the ring down in the background; the device must not stay open, nor memory pinned, until then. */
    (void)register_resource(ring, IORING_UNREGISTER_FILES, NULL, 0);
    (void)register_resource(ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
    munmap(ring->sqes, ring->sqes_bytes);
    munmap(ring->queues, ring->queues_bytes);
    close(ring->fd);
}

int bkv_ring_register_file(struct bkv_ring *ring, int fd)
{
    return register_resource(ring, IORING_REGISTER_FILES, &fd, 1);
}

int bkv_ring_register_buffer_table(struct bkv_ring *ring, uint32_t count)
{
    struct io_uring_rsrc_register table = {.nr = count, .flags = IORING_RSRC_REGISTER_SPARSE};
    return register_resource(ring, IORING_REGISTER_BUFFERS2, &table, sizeof table);
}

int bkv_ring_set_buffer(struct bkv_ring *ring, uint32_t slot, const void *address, uint64_t length_bytes)
{
    struct iovec iov = {(void *)(uintptr_t)address, length_bytes};
    uint64_t tag = 0;
    struct io_uring_rsrc_update2 update = {
        .offset = slot,
        .data = (uintptr_t)&iov,
        .tags = (uintptr_t)&tag,
        .nr = 1,
    };
    return register_resource(ring, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update);
}
