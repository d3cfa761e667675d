"""What a store is unlocked with, by whoever runs it: a passphrase, a key file, a key of the kernel's keyring.

As text, for commands, options of engines and the environment variable BLOCKKV_UNLOCK:

    passphrase               asked for on the terminal
    passphrase-file:PATH     the first line of a file
    key-file:PATH            a file of at least 32 secret bytes, as from head -c 32 /dev/urandom
    keyring:DESCRIPTION      a key of type "user" that request_key(2) finds, as from keyctl padd

A key file and a key of a keyring are the same to a store if they hold the same bytes.

Not here: what is made of it (`blockkv.encryption.volume_key`).
"""

from __future__ import annotations

import ctypes
import getpass
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

from blockkv.errors import InvalidArgument, WrongKey

__all__ = ["ENVIRONMENT", "MIN_SECRET_BYTES", "Passphrase", "Secret", "Unlock", "Unlocker", "parse_unlock"]

ENVIRONMENT = "BLOCKKV_UNLOCK"
MIN_SECRET_BYTES = 32
"""A secret is not stretched, so it has to be as strong as the keys that are derived from it."""
MAX_SECRET_BYTES = 1 << 20
KEYCTL_READ = 11
_SYSCALLS = {"x86_64": (249, 250), "aarch64": (218, 219)}
"""request_key and keyctl: there is no function of the C library for them, only libkeyutils."""


@dataclass(frozen=True, slots=True)
class Passphrase:
    """A passphrase, which a memory-hard function makes a key of. Raises InvalidArgument for an empty one."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidArgument(f"a passphrase is a text, not {type(self.text).__name__}")
        if not self.text:
            raise InvalidArgument("the passphrase is empty")


@dataclass(frozen=True, slots=True)
class Secret:
    """At least 32 bytes that nobody can guess. Raises InvalidArgument for fewer."""

    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not MIN_SECRET_BYTES <= len(self.data) <= MAX_SECRET_BYTES:
            raise InvalidArgument(
                f"a secret of {len(self.data)} bytes; it has to be {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
                f"random ones, for instance from: head -c {MIN_SECRET_BYTES} /dev/urandom"
            )


Unlock = str | bytes | Passphrase | Secret
"""What users give: where a secret is, as text; the secret itself, as bytes; or a passphrase."""


class Unlocker:
    """What was given to unlock stores, or else what BLOCKKV_UNLOCK names: read, or asked for, when needed."""

    def __init__(self, given: Unlock | None = None) -> None:
        self.is_explicit = given is not None
        """It was given for this store, which therefore has to be an encrypted one."""
        self._given = given
        self._secret: Passphrase | Secret | None = None

    def secret(self) -> Passphrase | Secret | None:
        """None where there is nothing. Raises as `parse_unlock`."""
        given = os.environ.get(ENVIRONMENT) if self._given is None else self._given
        if self._secret is None and given:
            self._secret = parse_unlock(given)
        return self._secret


def parse_unlock(given: Unlock, new: bool = False) -> Passphrase | Secret:
    """The passphrase or secret itself. `new`: it is asked for twice, if it is asked for.

    Raises InvalidArgument for what is neither, or is too short; WrongKey where it cannot be read.
    """
    if isinstance(given, Passphrase | Secret):
        return given
    if isinstance(given, bytes):
        return Secret(given)
    if not isinstance(given, str):
        raise InvalidArgument(f"{type(given).__name__} unlocks nothing; give text, bytes or a Passphrase")
    kind, _, where = given.partition(":")
    if given == "passphrase":
        return _asked(new)
    if kind == "passphrase-file" and where:
        line = _read(where).partition(b"\n")[0].removesuffix(b"\r")
        return Passphrase(line.decode(errors="surrogateescape"))
    if kind == "key-file" and where:
        return Secret(_read(where))
    if kind == "keyring" and where:
        return Secret(_read_keyring(where))
    raise InvalidArgument(
        f"{given!r} names nothing to unlock a store with; write passphrase, passphrase-file:PATH, "
        "key-file:PATH or keyring:DESCRIPTION"
    )


def _asked(new: bool) -> Passphrase:
    if sys.stdin is None or not sys.stdin.isatty():  # None: it was closed when Python started
        raise WrongKey("nobody can be asked for the passphrase here: use passphrase-file:PATH")
    text = getpass.getpass("new passphrase: " if new else "passphrase: ")
    if new and getpass.getpass("once more: ") != text:
        raise InvalidArgument("the passphrases differ")
    return Passphrase(text)


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise WrongKey(f"{path}: what unlocks the store cannot be read: {error.strerror}") from None


def _read_keyring(description: str) -> bytes:
    if platform.machine() not in _SYSCALLS:
        raise InvalidArgument(f"keyring: is not known on {platform.machine()}; use key-file:PATH")
    request_key, keyctl = _SYSCALLS[platform.machine()]
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    key = syscall(ctypes.c_long(request_key), b"user", description.encode(), None, ctypes.c_long(0))
    buffer = ctypes.create_string_buffer(MAX_SECRET_BYTES + 1)
    length = key
    if key >= 0:
        length = syscall(
            *(ctypes.c_long(number) for number in (keyctl, KEYCTL_READ, key)),
            buffer,
            ctypes.c_size_t(len(buffer)),
        )
    if length < 0:
        raise WrongKey(
            f'no key of type "user" named {description!r} in the keyring: {os.strerror(ctypes.get_errno())}; '
            f"add it: keyctl padd user {description} @u < PATH"
        )
    return buffer.raw[:length]
