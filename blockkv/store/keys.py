"""Keys: what a caller may use as one."""

from __future__ import annotations

from collections.abc import Sequence

from blockkv.errors import BlockKVError, InvalidArgument
from blockkv.format.record import MAX_KEY_BYTES

Key = str | bytes


def encode_key(key: Key) -> bytes:
    """The key's bytes (UTF-8 for str). Raises InvalidArgument unless they are 1 to 4096."""
    if isinstance(key, str):
        try:
            encoded = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"the key {key!r} is no valid text ({error.reason}); give it as bytes"
            ) from None
    elif isinstance(key, bytes):
        encoded = key
    else:
        raise InvalidArgument(f"a key is str or bytes, not {type(key).__name__}")
    if not 1 <= len(encoded) <= MAX_KEY_BYTES:
        raise InvalidArgument(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(encoded)}")
    return encoded


def encode_keys(keys: Sequence[Key]) -> tuple[list[bytes], dict[int, BlockKVError]]:
    """`encode_key` for many: the bytes of those that are right, in order, and the errors of the others."""
    encoded: list[bytes] = []
    errors: dict[int, BlockKVError] = {}
    for position, key in enumerate(keys):
        try:
            encoded.append(encode_key(key))
        except BlockKVError as error:
            errors[position] = error
    return encoded, errors
