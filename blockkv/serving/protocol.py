"""What crosses the socket between the owner of a catalog and its clients: every message, declared once.

A frame is a header and a body. The header has the length of the body, the kind of message, the number of the
request (the answer has the same; 0: nobody waits for one), and, in what the owner sends, the newest log
sequence that is durable. The body has the fields of the message, in the order in which they stand here. All
numbers are little-endian. Payload never crosses: keys, digests, extents, checksums and layouts do.

Invariants
  * whatever arrives is checked before it is used: a body that is too short, too long, or has a length in it
    that cannot be, raises Malformed, and reserves no memory beyond the frame itself;
  * one message has one encoding.

Not here: sockets (`wire`), what the messages do (`owner`, `session`, `client`).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from blockkv.errors import BlockKVError
from blockkv.format.record import DIGEST_BYTES

__all__ = [
    "FRAME_LIMIT_BYTES",
    "HEADER",
    "MESSAGES",
    "VERSION",
    "Acquire",
    "Acquired",
    "Allocate",
    "Answer",
    "BeginPuts",
    "Begun",
    "Changes",
    "Checkpoint",
    "Commit",
    "Count",
    "Delete",
    "Describe",
    "Described",
    "Document",
    "Doubt",
    "EndPuts",
    "EndWatch",
    "Ended",
    "Failure",
    "GiveUp",
    "Granted",
    "Hello",
    "Info",
    "Length",
    "ListKeys",
    "Listed",
    "Lookup",
    "Malformed",
    "Mark",
    "Marking",
    "Message",
    "Outcome",
    "Release",
    "Stats",
    "TakeChanges",
    "WaitForPut",
    "Welcome",
    "decode",
    "encode",
]

VERSION = 2
"""Of everything in this file. An owner and a client of different versions do not talk."""

HEADER = struct.Struct("<IHHQQ")
"""Bytes of the body, kind, zero, number of the request, newest durable log sequence."""

FRAME_LIMIT_BYTES = 8 << 20
"""Of a body: 256 keys of 4 KiB with their layouts are a quarter of that."""


class Malformed(BlockKVError):
    """What arrived is no message of this protocol."""


if TYPE_CHECKING:
    Numbers = array[int]
else:
    Numbers = array  # not subscriptable before Python 3.12

# -- fields --------------------------------------------------------------------------------------------

U8 = Annotated[int, "B"]
U32 = Annotated[int, "I"]
U64 = Annotated[int, "Q"]
I32 = Annotated[int, "i"]
I64 = Annotated[int, "q"]
F64 = Annotated[float, "d"]
Raw = Annotated[bytes, "raw"]
"""A length in 32 bits, and so many bytes."""
Text = Annotated[str, "text"]
"""The same in UTF-8."""
U32s = Annotated[Numbers, "U32s"]
U64s = Annotated[Numbers, "U64s"]
"""A count in 32 bits, and so many numbers."""
I32s = Annotated[Numbers, "I32s"]
Raws = Annotated[Sequence[bytes], "raws"]
"""A count in 32 bits, so many lengths in 32 bits, and the bytes of all, one after the other."""
Digests = Annotated[Sequence[bytes], "digests"]
"""A count in 32 bits, and so many digests."""

FIELD_KINDS = {
    "B": "u8",
    "I": "u32",
    "Q": "u64",
    "i": "i32",
    "q": "i64",
    "d": "f64",
    "raw": "bytes",
    "text": "text",
    "U32s": "list of u32",
    "U64s": "list of u64",
    "I32s": "list of i32",
    "raws": "list of bytes",
    "digests": "list of digests",
}
"""What the document calls them."""

_ARRAYS = {"U32s": "I", "U64s": "Q", "I32s": "i"}
_COUNT = struct.Struct("<I")


class _Reader:
    """Takes a body apart. Raises Malformed."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def take(self, size_bytes: int) -> memoryview:
        end = self._at + size_bytes
        if end > len(self._body):
            raise Malformed(f"a field of {size_bytes} bytes at {self._at} in a body of {len(self._body)}")
        taken = self._body[self._at : end]
        self._at = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        return int(_COUNT.unpack(self.take(4))[0])

    def numbers(self, code: str) -> array[int]:
        found = array(code)
        found.frombytes(self.take(self.count() * found.itemsize))
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def raws(self) -> list[bytes]:
        lengths = self.numbers("I")
        content = self.take(sum(lengths))
        found, start = [], 0
        for length in lengths:
            found.append(bytes(content[start : start + length]))
            start += length
        return found

    def digests(self) -> list[bytes]:
        content = bytes(self.take(self.count() * DIGEST_BYTES))
        return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]

    def text(self) -> str:
        try:
            return bytes(self.take(self.count())).decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"text that is none: {error}") from None

    def end(self) -> None:
        if self._at != len(self._body):
            raise Malformed(f"{len(self._body) - self._at} bytes behind the last field")


def _put_numbers(code: str, values: Sequence[int]) -> bytes:
    packed = values if isinstance(values, array) and values.typecode == code else array(code, values)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return _COUNT.pack(len(packed)) + packed.tobytes()


def _put_raws(values: Sequence[bytes]) -> bytes:
    return _put_numbers("I", list(map(len, values))) + b"".join(values)


def _put(kind: str, value: Any) -> bytes:
    if kind in _ARRAYS:
        return _put_numbers(_ARRAYS[kind], value)
    if kind == "raws":
        return _put_raws(value)
    if kind == "digests":
        return _COUNT.pack(len(value)) + b"".join(value)
    if kind == "raw":
        return _COUNT.pack(len(value)) + bytes(value)
    if kind == "text":
        encoded: bytes = value.encode(errors="backslashreplace")
        return _COUNT.pack(len(encoded)) + encoded
    return bytes(struct.pack("<" + kind, value))


def _get(kind: str, reader: _Reader) -> Any:
    if kind in _ARRAYS:
        return reader.numbers(_ARRAYS[kind])
    if kind == "raws":
        return reader.raws()
    if kind == "digests":
        return reader.digests()
    if kind == "raw":
        return bytes(reader.take(reader.count()))
    if kind == "text":
        return reader.text()
    return reader.number(kind)


# -- messages ------------------------------------------------------------------------------------------


class Message:
    """What all have in common. The fields of each are those of its class, in order."""

    KIND: ClassVar[int]


MESSAGES: dict[int, type[Message]] = {}
"""By kind."""

M = TypeVar("M", bound=Message)


@dataclass_transform()
def _message(kind: int) -> Callable[[type[M]], type[M]]:
    def declare(cls: type[M]) -> type[M]:
        declared = dataclass(frozen=True, slots=True)(cls)
        declared.KIND = kind
        assert kind not in MESSAGES
        MESSAGES[kind] = declared
        return declared

    return declare


def field_kinds(cls: type[Message]) -> list[tuple[str, str]]:
    """Names of the fields of a message, and how each is encoded."""
    known = _KINDS.get(cls)
    if known is not None:
        return known
    hints = get_type_hints(cls, include_extras=True)
    found = [(item.name, str(get_args(hints[item.name])[1])) for item in fields(cls)]  # type: ignore[arg-type]
    _KINDS[cls] = found
    return found


_KINDS: dict[type[Message], list[tuple[str, str]]] = {}


class Outcome:
    """Of one chunk in `Begun.outcomes`."""

    GRANTED = 0
    """Write it to these extents."""
    WAITING = 1
    """Claimed, and there is no space as it is: `Allocate`."""
    EXISTING = 2
    """It is there."""
    CLAIMED = 3
    """Somebody else is putting it: `WaitForPut`, or begin again and insist."""
    REFUSED = 4
    """The admission policy does not want it."""
    GROWING = 5
    """The key is reserved for a chunk that grows."""
    OVER_BUDGET = 6
    """The write budget does not hold it, or did not hold one before it."""


class Marking:
    """What `Mark` does."""

    TOUCH = 0
    PIN = 1
    UNPIN = 2


@_message(1)
class Hello(Message):
    """The first message of a client. Answer: `Welcome`, with two descriptors."""

    version: U32
    name: Text
    """For people: what the client is."""


@_message(2)
class Welcome(Message):
    """What is served. With it come the device, and the lifeline (`blockkv.device.engine.NativeDevice`)."""

    version: U32
    epoch: U64
    """Of this opening of the store: what was leased in another one is void."""
    superblock: Raw
    """As it is on the device: store id, geometry."""
    slot: U32
    """Of that superblock."""
    path: Text
    limits: Text
    """`blockkv.device.base.Limits` in JSON."""
    opened_sequence: U64
    """The newest log sequence that was on the device when this epoch began: what the one before had logged up
    to there was durable. 0: nobody can say."""
    cipher_key: Raw
    """Of a device that is encrypted, which a client decrypts itself; else empty."""


@_message(3)
class Failure(Message):
    """The answer to a request that cannot be carried out."""

    error: Text
    """A class of `blockkv.errors`."""
    errno: I32
    """0: none."""
    what: Text


@_message(4)
class Answer(Message):
    """A number; 0 also for no, 1 for yes and for done."""

    value: U64


Count = Answer


@_message(5)
class Document(Message):
    """Something for people and programs, in JSON."""

    text: Text


@_message(10)
class Acquire(Message):
    """Lease these chunks, in one step. Counts as a use. Answer: `Acquired`."""

    digests: Digests


@_message(11)
class Acquired(Message):
    """The chunks that are there; column by column."""

    positions: U32s
    """Which of the digests each has."""
    places: U32s
    """What the owner calls each, until it is released as often as it was acquired."""
    records: Raws
    """The PUT record of each: extents, checksums."""
    layouts: Raws
    layout_of: U32s
    """Which of `layouts` each has."""


@_message(12)
class Release(Message):
    """Give leases back. No answer."""

    places: U32s


@_message(13)
class Doubt(Message):
    """These leased chunks did not verify: look for yourself, and drop what is none. No answer."""

    places: U32s


@_message(14)
class Lookup(Message):
    """How many of these are there, from the first on without a gap. Answer: `Answer`."""

    digests: Digests
    counts_as_request: U8
    """Whether policies are to take it for a request of that prefix."""


@_message(20)
class BeginPuts(Message):
    """Claim these keys and find space for their chunks. Answer: `Begun`."""

    keys: Raws
    keys_are_text: Raw
    """A byte each."""
    sizes_bytes: U64s
    layouts: Raws
    layout_of: U32s
    """Which of `layouts` each has."""
    ttl_s: F64
    """0: none."""
    priority: I64
    insist: U8
    """Take also what others have claimed: whoever ends first has put it."""


@_message(21)
class Begun(Message):
    """What came of each, in the order of the request."""

    outcomes: Raw
    tickets: U64s
    """What to end it with; 0 for those that are not to be written."""
    extent_counts: U32s
    extents: U64s
    """(start, count) in units of the data zone, of all in order."""
    sequence: U64
    """The newest log sequence of those that are there."""


@_message(22)
class Allocate(Message):
    """Find space for one chunk that was begun, by eviction. Answer: `Granted`."""

    ticket: U64
    patient: U8
    """Whether to wait for others. Else, and while this client holds much, the answer may be empty."""


@_message(23)
class Granted(Message):
    """Where to write it; none: end what is being written first."""

    extents: U64s


@_message(24)
class EndPuts(Message):
    """What was begun is over. Answer: `Ended`."""

    tickets: U64s
    outcomes: I32s
    """0: all of it is written. Negative errno: nobody knows what is there now. 1: nothing was written."""
    leaves: Raws
    """Leaf checksums of what was written."""


@_message(25)
class Ended(Message):
    """What came of each."""

    inserted: Raw
    """1: it is stored, by this put. 0: it is not, or was put by somebody else meanwhile."""
    sequence: U64
    """The newest log sequence of those that are there."""


@_message(26)
class GiveUp(Message):
    """`EndPuts` for chunks of which nothing was written. No answer."""

    tickets: U64s


@_message(27)
class WaitForPut(Message):
    """Answer when nobody claims this key any more, or after a second: 1 when it is free."""

    digests: Digests


@_message(30)
class Delete(Message):
    """Remove a chunk. Answer: the log sequence, 0 where there was none."""

    digests: Digests


@_message(31)
class Commit(Message):
    """Make everything up to a log sequence durable; 0: everything. Answer when it is."""

    sequence: U64


@_message(32)
class Checkpoint(Message):
    """Write the index out. Answer when it is."""


@_message(33)
class Mark(Message):
    """Touch, pin or unpin. Answer: whether it is there (and was pinned). Pins end with the client."""

    digests: Digests
    marking: U8


@_message(40)
class Describe(Message):
    """What is known of a chunk. Answer: `Described`."""

    digests: Digests


@_message(41)
class Described(Message):
    """Its records; none where there is no chunk."""

    records: Raws
    layout: Raw
    durable: U8
    pins: U32


@_message(42)
class ListKeys(Message):
    """The next keys of a listing; with a number that is new, the first ones as of now. Answer: `Listed`."""

    listing: U32


@_message(43)
class Listed(Message):
    """Some keys; none at the end."""

    keys: Raws
    keys_are_text: Raw


@_message(44)
class TakeChanges(Message):
    """What came and went since the last time; with a number that is new, what is there. Answer: `Changes`."""

    watch: U32


@_message(45)
class Changes(Message):
    """Some changes, in order; column by column."""

    keys: Raws
    kinds: Raw
    """A byte each: bit 0: the key is text; bit 1: the chunk is there now."""
    sizes_bytes: U64s
    more: U8
    """Whether to ask again: all of them together are what was so at one moment."""


@_message(46)
class EndWatch(Message):
    """No more of this. No answer."""

    watch: U32


@_message(50)
class Stats(Message):
    """`Store.stats` of the owner. Answer: `Document`."""


@_message(51)
class Info(Message):
    """`Store.info` of the owner, and who its clients are. Answer: `Document`."""


@_message(52)
class Length(Message):
    """How many chunks there are. Answer: `Answer`."""


# -- frames --------------------------------------------------------------------------------------------


def encode(message: Message, request: int = 0, durable_sequence: int = 0) -> bytes:
    """A frame. Raises Malformed where it would be too long."""
    body = b"".join([_put(kind, getattr(message, name)) for name, kind in field_kinds(type(message))])
    if len(body) > FRAME_LIMIT_BYTES:
        raise Malformed(f"a {type(message).__name__} of {len(body)} bytes; the limit is {FRAME_LIMIT_BYTES}")
    return HEADER.pack(len(body), message.KIND, 0, request, durable_sequence) + body


def decode(kind: int, body: memoryview) -> Message:
    """The inverse of `encode`, without the header. Raises Malformed."""
    cls = MESSAGES.get(kind)
    if cls is None:
        raise Malformed(f"a message of kind {kind}")
    reader = _Reader(body)
    found = cls(*[_get(code, reader) for _, code in field_kinds(cls)])
    reader.end()
    return found
