"""The 4 KiB metadata page: one format for the journal and both checkpoints.

A page is believed only if it is *the page asked for*: whole, of this store, of this kind, with this sequence,
after this predecessor (or of this checkpoint), of this epoch. `decode_page` checks all of it and says which
check failed; a page that fails any is as good as absent.

Not here: which sequence and epoch to ask for (`journal`, `checkpoint`), the records inside (`record`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from blockkv.errors import FormatError, InvalidArgument
from blockkv.format.fields import Field, StructLayout
from blockkv.format.geometry import PAGE_BYTES

__all__ = [
    "CHECKSUM_BYTES",
    "COUNTER_LIMIT",
    "PAGE_HEADER",
    "PAGE_PAYLOAD_BYTES",
    "Page",
    "PageFault",
    "PageKind",
    "PageRejected",
    "checksum_of",
    "decode_page",
    "encode_page",
    "fill_pages",
]

CHECKSUM_BYTES = 16
COUNTER_LIMIT = 1 << 62
"""Sequences and epochs stay below this, so that arithmetic on hostile input stays in 64 bits."""

PAGE_HEADER = StructLayout(
    "page header",
    [
        Field("checksum", "bytes[16]", "XXH3-128 of bytes 16 to 4095: torn page, bit rot, never written"),
        Field("store_id", "bytes[16]", "UUID of the store: pages left by an earlier format of the device"),
        Field(
            "link",
            "bytes[16]",
            "journal: checksum of the page before it, against ghosts of another history; "
            "checkpoint: id of the checkpoint, against pages of an older one in the same area",
        ),
        Field(
            "sequence",
            "u64",
            "journal sequence, or page index in the checkpoint: misdirected I/O, earlier laps",
        ),
        Field(
            "epoch", "u64", "the writable open that wrote it: pages of a history that was cut off by a crash"
        ),
        Field(
            "sealed_sequence",
            "u64",
            "journal: newest sequence known flushed when this page was built; later ones may name payload "
            "that never landed; checkpoint: 0",
        ),
        Field("kind", "u16", "1 journal, 2 checkpoint: I/O misdirected across zones"),
        Field("record_count", "u16", "records in the body"),
        Field("body_bytes", "u16", "bytes of records; everything after them is zero"),
        Field("reserved", "zero[2]", "zero, checked"),
    ],
    size_bytes=80,
)
PAGE_PAYLOAD_BYTES = PAGE_BYTES - PAGE_HEADER.size_bytes

_pack_header = PAGE_HEADER.struct.pack
_unpack_header = PAGE_HEADER.struct.unpack_from
_ZEROS = bytes(PAGE_BYTES)


class PageKind(enum.IntEnum):
    JOURNAL = 1
    CHECKPOINT = 2


class PageFault(enum.Enum):
    """Every reason for which a page is not believed, in the order of the checks."""

    TORN = "checksum does not match: torn, rotten, unreadable or never written"
    WRONG_STORE = "belongs to another store"
    WRONG_KIND = "is of the other kind"
    WRONG_SEQUENCE = "has another sequence"
    WRONG_PREDECESSOR = "follows another page than the one before it"
    WRONG_CHECKPOINT = "belongs to another checkpoint"
    WRONG_EPOCH = "was written by another epoch"
    MALFORMED = "is ours, and its content violates the format"


class PageRejected(FormatError):
    """The page is not the one asked for. `fault` says why."""

    def __init__(self, fault: PageFault, detail: str = "") -> None:
        super().__init__(f"page {fault.value}" + (f": {detail}" if detail else ""))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Page:
    """A page that passed every check."""

    checksum: bytes
    link: bytes
    sequence: int
    epoch: int
    sealed_sequence: int
    record_count: int
    body: bytes
    """The encoded records, without padding; see `record.iterate_records`."""


def encode_page(
    kind: PageKind,
    store_id: bytes,
    sequence: int,
    epoch: int,
    link: bytes,
    sealed_sequence: int,
    records: Sequence[bytes],
) -> bytes:
    """One page of `PAGE_BYTES` holding `records` in order.

    Raises InvalidArgument when the records do not fit or a field is out of range.
    """
    return encode_body(
        kind, store_id, sequence, epoch, link, sealed_sequence, b"".join(records), len(records)
    )


def encode_body(
    kind: PageKind,
    store_id: bytes,
    sequence: int,
    epoch: int,
    link: bytes,
    sealed_sequence: int,
    body: bytes,
    record_count: int,
) -> bytes:
    """One page of `PAGE_BYTES` with a body of encoded records. Raises as `encode_page` does."""
    if len(body) > PAGE_PAYLOAD_BYTES:
        raise InvalidArgument(
            f"{record_count} records of {len(body)} bytes exceed {PAGE_PAYLOAD_BYTES} in a page"
        )
    if len(store_id) != 16 or len(link) != 16:
        raise InvalidArgument(f"store id of {len(store_id)} and link of {len(link)} bytes must have 16 each")
    if not (0 <= sealed_sequence <= sequence < COUNTER_LIMIT and 0 <= epoch < COUNTER_LIMIT):
        raise InvalidArgument(
            f"sequence {sequence}, sealed {sealed_sequence}, epoch {epoch} are out of range"
        )
    header = _pack_header(
        b"", store_id, link, sequence, epoch, sealed_sequence, kind, record_count, len(body), b""
    )
    content = header[CHECKSUM_BYTES:] + body
    content += _ZEROS[: PAGE_BYTES - CHECKSUM_BYTES - len(content)]
    return xxh3_128_digest(content) + content


def checksum_of(page: bytes) -> bytes:
    """The checksum an encoded page carries: what the next journal page names as its predecessor."""
    return bytes(page[:CHECKSUM_BYTES])


def decode_page(
    data: bytes | memoryview,
    *,
    kind: PageKind,
    store_id: bytes,
    sequence: int,
    link: bytes | None = None,
    epoch: int | None = None,
) -> Page:
    """The page, if it is the one asked for. `link` and `epoch` of None accept any.

    Raises PageRejected with the first failing check in the order of `PageFault`. Data of another length than
    a page, as after a failed read, count as TORN.
    """
    if len(data) != PAGE_BYTES:
        raise PageRejected(PageFault.TORN, f"{len(data)} bytes")
    view = memoryview(data)
    (checksum, its_store, its_link, its_sequence, its_epoch, sealed_sequence, its_kind, record_count,
     body_bytes, reserved) = _unpack_header(view)  # fmt: skip
    if xxh3_128_digest(view[CHECKSUM_BYTES:]) != checksum:
        raise PageRejected(PageFault.TORN)
    if its_store != store_id:
        raise PageRejected(PageFault.WRONG_STORE, f"{its_store.hex()} instead of {store_id.hex()}")
    if its_kind != kind:
        raise PageRejected(PageFault.WRONG_KIND, f"{its_kind} instead of {int(kind)}")
    if its_sequence != sequence:
        raise PageRejected(PageFault.WRONG_SEQUENCE, f"{its_sequence} instead of {sequence}")
    if link is not None and its_link != link:
        fault = PageFault.WRONG_PREDECESSOR if kind == PageKind.JOURNAL else PageFault.WRONG_CHECKPOINT
        raise PageRejected(fault, f"{its_link.hex()} instead of {link.hex()}")
    if epoch is not None and its_epoch != epoch:
        raise PageRejected(PageFault.WRONG_EPOCH, f"{its_epoch} instead of {epoch}")
    if body_bytes > PAGE_PAYLOAD_BYTES or any(reserved):
        raise PageRejected(PageFault.MALFORMED, f"{body_bytes} bytes of records, reserved {reserved.hex()}")
    if its_sequence >= COUNTER_LIMIT or its_epoch >= COUNTER_LIMIT:
        raise PageRejected(PageFault.MALFORMED, f"sequence {its_sequence}, epoch {its_epoch}")
    if sealed_sequence > sequence:
        raise PageRejected(PageFault.MALFORMED, f"sealed sequence {sealed_sequence} in page {sequence}")
    body_end = PAGE_HEADER.size_bytes + body_bytes
    if view[body_end:] != _ZEROS[: PAGE_BYTES - body_end]:
        raise PageRejected(PageFault.MALFORMED, f"bytes after {body_end} are not zero")
    return Page(
        checksum,
        its_link,
        its_sequence,
        its_epoch,
        sealed_sequence,
        record_count,
        bytes(view[PAGE_HEADER.size_bytes : body_end]),
    )


def fill_pages(records: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Divide records, in order, into lists that each fit in a page.

    A page is closed by the first record that does not fit, so two successive pages always hold more than one
    page's worth. Raises InvalidArgument for a record larger than a page.
    """
    current: list[bytes] = []
    free_bytes = PAGE_PAYLOAD_BYTES
    for record in records:
        if len(record) > free_bytes:
            if len(record) > PAGE_PAYLOAD_BYTES:
                raise InvalidArgument(f"record of {len(record)} bytes exceeds {PAGE_PAYLOAD_BYTES} in a page")
            yield current
            current, free_bytes = [], PAGE_PAYLOAD_BYTES
        current.append(record)
        free_bytes -= len(record)
    if current:
        yield current
