/* Transfers -> operations. */
#ifndef BKV_PLAN_H
#define BKV_PLAN_H

#include "batch.h"
#include "region.h"

struct bkv_plan_totals {
    uint64_t direct_bytes, bounced_bytes, bounced_transfers;
};

/* Fills in the operations of `batch`. With `stage_all` every one of them lies in staging, in one piece, and begins and
 * ends on a unit of the device. 0 or -ENOMEM. */
int bkv_plan(struct bkv_batch *batch, const struct bkv_options *options, uint32_t operation_bytes, bool stage_all,
             struct bkv_regions *regions, struct bkv_plan_totals *totals);

#endif
