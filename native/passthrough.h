/* Passthrough: a request is an NVMe command, handed to the generic character device of a namespace (/dev/ngXnY)
 * as IORING_OP_URING_CMD. The block layer takes no part: nothing splits, merges or retries it.
 */
#ifndef BKV_PASSTHROUGH_H
#define BKV_PASSTHROUGH_H

#include <stdbool.h>
#include <stdint.h>

#include "engine.h"
#include "operation.h"
#include "ring.h"

/* Fills in a zeroed entry of a ring with wide entries. `memory` and `count` are bkv_operation_memory's; `fixed`: the
 * one iovec is registered, as entry `operation->fixed_index`. The entry's file, flags and user_data are left alone. */
void bkv_passthrough_prepare(struct io_uring_sqe *sqe, const struct bkv_options *options,
                             const struct bkv_operation *operation, const struct iovec *memory, uint32_t count,
                             bool fixed);

/* Turns a completion (0, the status of an NVMe completion, or what the kernel refused the command with) into what
 * bkv_operation_settle judges: bytes moved, or a negative errno; -EAGAIN: issue it again. `fixed_refused` is set when
 * the kernel takes no registered memory for such a command. */
int32_t bkv_passthrough_answer(const struct bkv_options *options, struct bkv_operation *operation, int32_t result,
                               bool *fixed_refused);

/* The negative errno that the driver and the block layer make of an NVMe status (without its do-not-retry bit). */
int32_t bkv_nvme_errno(uint32_t status);

/* Reads the first LBA, and drops it: whether such commands are accepted. 0 or a negative errno. */
int bkv_passthrough_try(struct bkv_ring *ring, const struct bkv_options *options);

#endif
