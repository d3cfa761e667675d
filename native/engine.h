/* The native engine: carries out batches of transfers on one open device.
 *
 * A batch goes through four stations, each with its own file:
 *   batch.c    private copies of what the caller described, validated; results and leaf accounting
 *   plan.c     transfers -> operations: sorted by device offset, coalesced, bounded
 *   reactor.c  operations -> io_uring (pool.c: -> preadv/pwritev where io_uring is refused;
 *              passthrough.c: -> NVMe commands through io_uring, where asked for)
 *   worker.c   staging copies, leaf checksums and encryption (cipher.c)
 * engine.c owns the queues between them.
 *
 * Threads: any number of callers; one reactor (or several pool threads); a few workers. Every
 * function here may be called from any thread. Nothing here may be called in a forked child except
 * bkv_engine_abandon.
 *
 * Not here: opening or probing the device, comparing checksums, order of writes.
 */
#ifndef BKV_ENGINE_H
#define BKV_ENGINE_H

#include <stdint.h>

enum bkv_direction { BKV_READ = 0, BKV_WRITE = 1 };

/* Served in this order; the values are those of blockkv.device.base.Priority. */
enum bkv_priority { BKV_LOAD = 0, BKV_PRELOAD = 1, BKV_STORE = 2, BKV_PRIORITY_COUNT = 3 };

/* How long what is written will live; the values are those of blockkv.device.base.Placement. */
enum bkv_placement { BKV_DATA = 0, BKV_METADATA = 1, BKV_BRIEF = 2, BKV_KEPT = 3, BKV_PLACEMENT_COUNT = 4 };

enum bkv_backend { BKV_BACKEND_IO_URING = 0, BKV_BACKEND_THREADS = 1, BKV_BACKEND_PASSTHROUGH = 2 };

enum {
    BKV_UNIT_BYTES = 4096,            /* blockkv.device.base.UNIT_BYTES */
    BKV_MAX_OPERATION_BYTES = 524288, /* larger requests are split and handed to kernel worker threads */
    BKV_MAX_DEPTH = 4096,
    BKV_MAX_WORKERS = 64,
    BKV_CIPHER_KEY_BYTES = 64,        /* AES-256-XTS has two keys of 256 bits */
};

/* One transfer, as packed by blockkv.device.base.Batch.add: six 64-bit words. */
struct bkv_transfer {
    uint64_t payload_bytes;
    uint32_t first_extent, extent_count;
    uint32_t first_segment, segment_count;
    uint32_t first_leaf, leaf_count;
    uint64_t leaf_bytes; /* 0: no checksums */
    int32_t result;      /* written at completion: 0 or a negative errno */
    uint32_t flags;      /* reserved, 0 */
};

struct bkv_extent {
    uint64_t offset_bytes, length_bytes;
};

struct bkv_segment {
    uint64_t address, length_bytes;
};

struct bkv_options {
    uint64_t size_bytes;
    uint64_t staging_bytes;
    int32_t fd; /* open for direct I/O; the engine never closes it, except in bkv_engine_abandon */
    int32_t passthrough_fd; /* of BKV_BACKEND_PASSTHROUGH: the character device of the same namespace; as above */
    int32_t lifeline_fd;    /* kept open as long as the kernel has requests of this engine, also those of a process that
                             * was killed; or -1. As above; not for passthrough */
    uint32_t nsid;          /* and the namespace's number */
    uint32_t is_placed;     /* whether write commands name the placement identifiers of the namespace: these */
    uint16_t placement_identifiers[BKV_PLACEMENT_COUNT]; /* by enum bkv_placement */
    uint32_t backend;
    uint32_t lba_bytes;
    uint32_t memory_alignment_bytes;
    uint32_t max_transfer_bytes;
    uint32_t max_segments;
    uint32_t memory_boundary_bytes; /* inside a request, pieces of memory meet at multiples of it; 0: anywhere */
    uint32_t depth;
    uint32_t workers;
};

/* Why a call failed: a negative errno, and the words for the exception. */
struct bkv_failure {
    int32_t code;
    char message[252];
};

/* What to carry out. The first three arrays are copied by bkv_engine_submit; `transfers` and `leaf_values`
 * are written at completion and must stay where they are until then, like the segments themselves. */
struct bkv_request {
    struct bkv_transfer *transfers;
    const struct bkv_extent *extents;
    const struct bkv_segment *segments;
    uint64_t *leaf_values;
    uint64_t transfer_count, extent_count, segment_count, leaf_count;
    uint64_t token;       /* non-zero: bkv_engine_next returns it at completion; zero: somebody calls wait */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC: what the device has not got by then fails with ETIME; 0: none */
    uint32_t direction, priority;
    uint32_t on_caller; /* with token 0: the thread may carry it out, here and in bkv_engine_wait, which it must call */
    uint32_t placement; /* of writes */
};

struct bkv_counters {
    uint64_t device_read_bytes, device_write_bytes, device_requests, ring_enters;
    uint64_t data_write_bytes, metadata_write_bytes, brief_write_bytes, kept_write_bytes; /* of the bytes written */
    uint64_t bounced_bytes, bounced_transfers, direct_bytes;
    uint64_t fixed_requests, coalesced_requests, short_transfers, resubmitted, isolated_requests;
    uint64_t flushes, discards, hashed_bytes, expired_requests;
    uint64_t arena_bytes; /* registered now */
};

struct bkv_engine;
struct bkv_batch;

/* NULL on failure, with `failure` filled in: its code is what the refused system call returned. */
struct bkv_engine *bkv_engine_open(const struct bkv_options *options, struct bkv_failure *failure);

/* From here on what lies in [from, to) on the device, whole units, is encrypted there: see cipher.h. Everything goes
 * through staging then. Waits for what is in flight; nobody may submit meanwhile. A second call replaces the first. 0,
 * or a negative errno with `failure` filled in: EINVAL, ELIBACC (no libcrypto), ENOMEM, ESHUTDOWN. */
int bkv_engine_encrypt(struct bkv_engine *engine, const uint8_t *key, uint64_t from_bytes, uint64_t to_bytes,
                       struct bkv_failure *failure);

/* Starts a batch, or returns a negative errno with nothing started: EINVAL (the request contradicts
 * itself or the device), ESHUTDOWN (closed), ENOMEM. Never waits for the device. */
int bkv_engine_submit(struct bkv_engine *engine, const struct bkv_request *request,
                      struct bkv_batch **batch, struct bkv_failure *failure);

/* Returns when the batch (submitted with token 0) is done, and frees it; `*batch` is NULL then. */
void bkv_engine_wait(struct bkv_engine *engine, struct bkv_batch **batch);

/* Returns the token of the next batch that is done, and frees that batch; 0 once the engine is closed and
 * every token was handed out. */
uint64_t bkv_engine_next(struct bkv_engine *engine);

/* Both work in the calling thread and return 0 or a negative errno. A flush covers what completed before it. */
int bkv_engine_flush(struct bkv_engine *engine);
int bkv_engine_discard(struct bkv_engine *engine, uint64_t offset_bytes, uint64_t length_bytes);

/* A handle >= 0, or a negative errno: EOPNOTSUPP (backend or kernel has no registered buffers), ENOSPC (table
 * full), else what the kernel said. Runs on the reactor, between two batches of completions. */
int bkv_engine_register(struct bkv_engine *engine, uint64_t address, uint64_t length_bytes);
int bkv_engine_unregister(struct bkv_engine *engine, int handle);

/* Names memory of which parts are registered when transfers use them. It must be removed before it is unmapped; nothing
 * of it may be in flight then. 0, or a negative errno as from register: the memory works all the same. */
int bkv_engine_arena_add(struct bkv_engine *engine, uint64_t address, uint64_t length_bytes);
int bkv_engine_arena_remove(struct bkv_engine *engine, uint64_t address);

void bkv_engine_counters(const struct bkv_engine *engine, struct bkv_counters *counters);

/* Refuses new work, waits for what is in flight, stops every thread. Idempotent. Batches that are done but
 * not yet waited for stay valid. */
void bkv_engine_close(struct bkv_engine *engine);

/* Closes if necessary, then frees. Nobody may be inside another call. */
void bkv_engine_free(struct bkv_engine *engine);

/* In a forked child: closes the descriptors the child inherited (device, ring), so that they do not outlive
 * the parent. Touches neither the ring nor the threads, which stayed in the parent. */
void bkv_engine_abandon(struct bkv_engine *engine);

#endif
