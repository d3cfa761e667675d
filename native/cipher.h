/* Encryption of what lies on the device: AES-256-XTS (IEEE 1619, NIST SP 800-38E). A data unit is one unit of the
 * device, its tweak the number of that unit, 64 bits little-endian: dm-crypt's aes-xts-plain64 with sectors of 4096
 * bytes and large-sector numbers.
 *
 * AES itself is libcrypto's (OpenSSL 3 or 1.1), which is loaded when the first key arrives: without encryption nobody
 * needs it. */
#ifndef BKV_CIPHER_H
#define BKV_CIPHER_H

#include <stdbool.h>
#include <stdint.h>

#include "engine.h"

struct bkv_cipher;

/* For `users` threads at once. What lies outside of [from, to) on the device is left as it is. NULL, with `failure`
 * filled in: ELIBACC (no libcrypto, or one that cannot), ENOMEM. */
struct bkv_cipher *bkv_cipher_open(const uint8_t key[BKV_CIPHER_KEY_BYTES], uint64_t from_bytes, uint64_t to_bytes,
                                   uint32_t users, struct bkv_failure *failure);
void bkv_cipher_close(struct bkv_cipher *cipher);

/* Whole units of the device from `offset_bytes` on; `to` may be `from`. False: libcrypto failed, and what is at `to` is
 * undefined. */
bool bkv_cipher_encrypt(struct bkv_cipher *cipher, uint64_t offset_bytes, uint8_t *to, const uint8_t *from,
                        uint32_t length_bytes);
bool bkv_cipher_decrypt(struct bkv_cipher *cipher, uint64_t offset_bytes, uint8_t *to, const uint8_t *from,
                        uint32_t length_bytes);

#endif
