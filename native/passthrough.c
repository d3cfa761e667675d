#define _GNU_SOURCE
#include "passthrough.h"

#include <errno.h>
#include <linux/nvme_ioctl.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"

enum {
    /* opcodes of the NVM command set, NVM Express NVM Command Set Specification 1.0, figure 16 */
    OPCODE_WRITE = 0x01,
    OPCODE_READ = 0x02,
    /* the directive of a write: DTYPE in CDW12, DSPEC, here a placement identifier, in CDW13 (TP4146) */
    DATA_PLACEMENT = 0x02,
    DTYPE_SHIFT = 20,
    DSPEC_SHIFT = 16,
    /* of a status field, as the driver hands it on: without the phase bit */
    DO_NOT_RETRY = 0x4000,
    STATUS_MASK = 0x7ff, /* type and code */
    /* The driver repeats a block request this often (drivers/nvme/host/core.c: nvme_max_retries), a command never. */
    RETRIES = 5,
};

static void fill(struct io_uring_sqe *sqe, const struct bkv_options *options, bool read, uint64_t offset_bytes,
                 uint32_t length_bytes)
{
    struct nvme_uring_cmd *command = (struct nvme_uring_cmd *)sqe->cmd;
    uint64_t first_lba = offset_bytes / options->lba_bytes;
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->cmd_op = NVME_URING_CMD_IO;
    command->opcode = read ? OPCODE_READ : OPCODE_WRITE;
    command->nsid = options->nsid;
    command->cdw10 = (uint32_t)first_lba;
    command->cdw11 = (uint32_t)(first_lba >> 32);
    command->cdw12 = length_bytes / options->lba_bytes - 1; /* counted from 0, in 16 bits */
}

void bkv_passthrough_prepare(struct io_uring_sqe *sqe, const struct bkv_options *options,
                             const struct bkv_operation *operation, const struct iovec *memory, uint32_t count,
                             bool fixed)
{
    struct nvme_uring_cmd *command = (struct nvme_uring_cmd *)sqe->cmd;
    bool read = operation->batch->direction == BKV_READ;
    fill(sqe, options, read, operation->offset_bytes, operation->length_bytes);
    if (!read && options->is_placed) {
        uint32_t identifier = options->placement_identifiers[operation->batch->placement];
        command->cdw12 |= DATA_PLACEMENT << DTYPE_SHIFT;
        command->cdw13 = identifier << DSPEC_SHIFT;
    }
    if (count == 1) {
        command->addr = (uintptr_t)memory->iov_base;
        command->data_len = (uint32_t)memory->iov_len;
        if (fixed) {
            sqe->uring_cmd_flags = IORING_URING_CMD_FIXED;
            sqe->buf_index = (uint16_t)operation->fixed_index;
        }
    } else {
        sqe->cmd_op = NVME_URING_CMD_IO_VEC;
        command->addr = (uintptr_t)memory;
        command->data_len = count; /* of iovecs */
    }
}

int32_t bkv_nvme_errno(uint32_t status)
{
    /* drivers/nvme/host/core.c: nvme_error_status; block/blk-core.c: blk_errors */
    switch (status & STATUS_MASK) {
    case 0x000: /* Successful Completion */
        return 0;
    case 0x00b: /* Invalid Namespace: it was valid at open. The driver has "not supported" for it, and then looks */
        return -ENODEV;
    case 0x081: /* Capacity Exceeded */
        return -ENOSPC;
    case 0x080: /* LBA Out of Range */
    case 0x021: /* Command Interrupted */
    case 0x082: /* Namespace Not Ready */
        return -EREMOTEIO;
    case 0x001: /* Invalid Command Opcode */
    case 0x002: /* Invalid Field in Command */
    case 0x180: /* Conflicting Attributes */
    case 0x183: /* Command Size Limit Exceeded; "not supported" to the driver */
        return -EOPNOTSUPP;
    case 0x182: /* Attempted Write to Read Only Range */
    case 0x280: /* Write Fault */
    case 0x281: /* Unrecovered Read Error */
    case 0x285: /* Compare Failure */
    case 0x286: /* Access Denied */
    case 0x287: /* Deallocated or Unwritten Logical Block */
        return -ENODATA;
    case 0x181: /* Invalid Protection Information */
    case 0x282: /* End-to-end Guard Check Error */
    case 0x283: /* End-to-end Application Tag Check Error */
    case 0x284: /* End-to-end Reference Tag Check Error */
        return -EILSEQ;
    case 0x083: /* Reservation Conflict */
        return -EBADE;
    case 0x370: /* Host Pathing Error */
        return -ENOLINK;
    default:
        return -EIO;
    }
}

int32_t bkv_passthrough_answer(const struct bkv_options *options, struct bkv_operation *operation, int32_t result,
                               bool *fixed_refused)
{
    if (!result)
        return (int32_t)operation->length_bytes;
    if (bkv_device_is_gone(options->fd))
        return -ENODEV; /* whatever the reason given */
    if (result > 0) {
        if (!(result & DO_NOT_RETRY) && operation->attempts < RETRIES)
            return -EAGAIN;
        return bkv_nvme_errno((uint32_t)result);
    }
    if (result == -EINVAL && operation->fixed_index >= 0) {
        /* Before Linux 6.13 registered memory of more pages than the device has segments is refused, whatever part of
         * it the command is about (block/blk-map.c: blk_rq_map_user_bvec); before 6.1 all of it is. */
        operation->fixed_index = -1;
        *fixed_refused = true;
        return -EAGAIN;
    }
    return result;
}

/* One command, waited for. What the kernel answered, in `result`; 0 or a negative errno of the ring. */
static int read_first_lba(struct bkv_ring *ring, const struct bkv_options *options, void *memory, int32_t *result)
{
    struct io_uring_sqe *sqe = bkv_ring_sqe(ring);
    struct nvme_uring_cmd *command = (struct nvme_uring_cmd *)sqe->cmd;
    fill(sqe, options, true, 0, options->lba_bytes);
    command->addr = (uintptr_t)memory;
    command->data_len = options->lba_bytes;
    sqe->fd = options->passthrough_fd;
    uint64_t user_data;
    int code;
    do
        code = bkv_ring_enter(ring, 1);
    while (!code && !bkv_ring_next(ring, &user_data, result));
    return code;
}

int bkv_passthrough_try(struct bkv_ring *ring, const struct bkv_options *options)
{
    void *memory = aligned_alloc(BKV_UNIT_BYTES, BKV_UNIT_BYTES);
    if (!memory)
        return -ENOMEM;
    int32_t result = -EINTR; /* the controller was reset meanwhile */
    int code = 0;
    for (int i = 0; i <= RETRIES && !code && result == -EINTR; i++)
        code = read_first_lba(ring, options, memory, &result);
    free(memory);
    return code ? code : result < 0 ? result : 0; /* a status above 0 is the drive's, which took the command */
}
