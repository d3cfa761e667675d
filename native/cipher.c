#include "cipher.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"

enum { TWEAK_BYTES = 16, DECRYPT = 0, ENCRYPT = 1, AS_BEFORE = -1 };

/* libcrypto's EVP interface (evp.h), the part that has not changed since 1.1. */
static struct {
    void *(*context_new)(void);
    void (*context_free)(void *context);
    const void *(*aes_256_xts)(void);
    int (*init)(void *context, const void *cipher, void *engine, const uint8_t *key, const uint8_t *tweak, int encrypt);
    int (*update)(void *context, uint8_t *out, int *out_bytes, const uint8_t *in, int in_bytes);
} crypto;

static pthread_once_t crypto_once = PTHREAD_ONCE_INIT;
static bool crypto_loaded;

static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found); /* ISO C has no cast from an object's address to a function's */
    return found;
}

static void load_crypto(void)
{
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !crypto_loaded; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        crypto_loaded = library && find(library, "EVP_CIPHER_CTX_new", &crypto.context_new)
                        && find(library, "EVP_CIPHER_CTX_free", &crypto.context_free)
                        && find(library, "EVP_aes_256_xts", &crypto.aes_256_xts)
                        && find(library, "EVP_CipherInit_ex", &crypto.init)
                        && find(library, "EVP_CipherUpdate", &crypto.update);
        if (library && !crypto_loaded)
            dlclose(library);
    }
}

/* What one thread needs: setting up a key costs more than encrypting a unit. */
struct contexts {
    struct contexts *next;
    void *of[2]; /* DECRYPT, ENCRYPT */
};

struct bkv_cipher {
    uint64_t from_bytes, to_bytes;
    pthread_mutex_t mutex;
    pthread_cond_t given;
    struct contexts *unused;
    uint32_t count;
    struct contexts all[];
};

struct bkv_cipher *bkv_cipher_open(const uint8_t key[BKV_CIPHER_KEY_BYTES], uint64_t from_bytes, uint64_t to_bytes,
                                   uint32_t users, struct bkv_failure *failure)
{
    pthread_once(&crypto_once, load_crypto);
    if (!crypto_loaded) {
        bkv_refuse(failure, -ELIBACC, "libcrypto.so.3 (OpenSSL) cannot be loaded");
        return NULL;
    }
    struct bkv_cipher *cipher = calloc(1, sizeof *cipher + users * sizeof *cipher->all);
    if (!cipher) {
        bkv_refuse(failure, -ENOMEM, "no memory for a cipher");
        return NULL;
    }
    cipher->from_bytes = from_bytes;
    cipher->to_bytes = to_bytes;
    cipher->count = users;
    pthread_mutex_init(&cipher->mutex, NULL);
    pthread_cond_init(&cipher->given, NULL);
    static const uint8_t tweak[TWEAK_BYTES];
    bool ready = true;
    for (uint32_t i = 0; i < users; i++) {
        struct contexts *contexts = &cipher->all[i];
        for (int encrypt = DECRYPT; encrypt <= ENCRYPT; encrypt++) {
            contexts->of[encrypt] = crypto.context_new();
            ready = ready && contexts->of[encrypt]
                    && crypto.init(contexts->of[encrypt], crypto.aes_256_xts(), NULL, key, tweak, encrypt) == 1;
        }
        contexts->next = cipher->unused;
        cipher->unused = contexts;
    }
    if (!ready) {
        bkv_refuse(failure, -ELIBACC, "libcrypto refuses AES-256-XTS or its key");
        bkv_cipher_close(cipher);
        return NULL;
    }
    return cipher;
}

void bkv_cipher_close(struct bkv_cipher *cipher)
{
    if (!cipher)
        return;
    for (uint32_t i = 0; i < cipher->count; i++)
        for (int encrypt = DECRYPT; encrypt <= ENCRYPT; encrypt++)
            crypto.context_free(cipher->all[i].of[encrypt]); /* which wipes the key */
    pthread_cond_destroy(&cipher->given);
    pthread_mutex_destroy(&cipher->mutex);
    free(cipher);
}

static bool convert(struct bkv_cipher *cipher, int encrypt, uint64_t offset_bytes, uint8_t *to, const uint8_t *from,
                    uint32_t length_bytes)
{
    pthread_mutex_lock(&cipher->mutex);
    while (!cipher->unused)
        pthread_cond_wait(&cipher->given, &cipher->mutex);
    struct contexts *contexts = cipher->unused;
    cipher->unused = contexts->next;
    pthread_mutex_unlock(&cipher->mutex);

    void *context = contexts->of[encrypt];
    bool converted = true;
    for (uint32_t done = 0; converted && done < length_bytes; done += BKV_UNIT_BYTES) {
        uint64_t at = offset_bytes + done, unit = at / BKV_UNIT_BYTES;
        if (at < cipher->from_bytes || at >= cipher->to_bytes) {
            memmove(to + done, from + done, BKV_UNIT_BYTES);
            continue;
        }
        uint8_t tweak[TWEAK_BYTES] = {0};
        for (int i = 0; i < 8; i++)
            tweak[i] = (uint8_t)(unit >> 8 * i);
        int out_bytes = 0;
        converted = crypto.init(context, NULL, NULL, NULL, tweak, AS_BEFORE) == 1
                    && crypto.update(context, to + done, &out_bytes, from + done, BKV_UNIT_BYTES) == 1
                    && out_bytes == BKV_UNIT_BYTES;
    }

    pthread_mutex_lock(&cipher->mutex);
    contexts->next = cipher->unused;
    cipher->unused = contexts;
    pthread_cond_signal(&cipher->given);
    pthread_mutex_unlock(&cipher->mutex);
    return converted;
}

bool bkv_cipher_encrypt(struct bkv_cipher *cipher, uint64_t offset_bytes, uint8_t *to, const uint8_t *from,
                        uint32_t length_bytes)
{
    return convert(cipher, ENCRYPT, offset_bytes, to, from, length_bytes);
}

bool bkv_cipher_decrypt(struct bkv_cipher *cipher, uint64_t offset_bytes, uint8_t *to, const uint8_t *from,
                        uint32_t length_bytes)
{
    return convert(cipher, DECRYPT, offset_bytes, to, from, length_bytes);
}
