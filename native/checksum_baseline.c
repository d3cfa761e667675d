/* XXH3-64 for the instruction set the compiler was told to target (SSE2 on x86-64, NEON on aarch64). */
#define BKV_VARIANT(name) bkv_##name##_baseline
#include "checksum_variant.h"
