"""Keys of encrypted stores: what opens one, and what is derived from it.

Not here: AES on the way to the device (`native/cipher.c`), and the order of writes (`blockkv.store`).
"""
