"""The superblock: the root of everything, in eight slots of 4 KiB.

Generation g is written to slot g mod 4 of the head, then of the tail; the newest valid slot wins. Writing
generation g + 1 therefore never touches a copy of g. Everything a superblock names (checkpoint, journal
pages from the anchor on) stays intact until a newer superblock is durable in both copies.

The first 80 bytes (checksum to compat) are frozen: every later version keeps them where they are, so that an
older blockkv recognises a newer store and refuses it instead of calling the device unformatted.

All fields that change after formatting lie in the first 512 bytes: on a drive that writes 512-byte sectors
whole, a slot cannot be torn into a mixture. What a member of an array and an encrypted store say behind them
does not change, and is written to every slot at once; but for the authentication code of an encrypted store,
which is another in each superblock: there a slot can be torn, and counts as not written.

Not here: reading and writing the slots, and when (`blockkv.store`).
"""

from __future__ import annotations

import enum
import hmac
import struct
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xxhash import xxh3_128_digest

from blockkv.errors import FormatError, InvalidArgument, NotFormatted, VersionTooNew
from blockkv.format import geometry as geometries
from blockkv.format import key_slots
from blockkv.format.fields import Field, FieldRejected, StructLayout
from blockkv.format.geometry import PAGE_BYTES, RUN_BYTES, SLOT_COUNT, SLOTS_PER_COPY, Geometry, Zone
from blockkv.format.key_slots import KEY_SLOTS_BYTES, KeySlot
from blockkv.format.page import PAGE_PAYLOAD_BYTES

__all__ = [
    "FORMAT_VERSION",
    "MAGIC",
    "MAX_MEMBERS",
    "RESERVED_BYTES",
    "SUPERBLOCK",
    "Encryption",
    "Membership",
    "Superblock",
    "SuperblockFault",
    "SuperblockRejected",
    "choose",
    "decode",
    "examine",
    "newest_of",
    "slots_of",
]

MAGIC = b"blockkv\0"
FORMAT_VERSION = 1
INCOMPAT_ENCRYPTION = 1 << 0
"""Everything but the superblocks is encrypted."""
INCOMPAT_ARRAY = 1 << 1
"""The store is a member of an array."""
KNOWN_INCOMPAT = INCOMPAT_ENCRYPTION | INCOMPAT_ARRAY
KNOWN_RO_COMPAT = 0
KNOWN_COMPAT = 0
COUNTER_LIMIT = 1 << 62
"""Sequences, epochs and generations stay below this, so that arithmetic on hostile input stays in 64 bits."""
MAX_MEMBERS = 32
"""Of an array: as many as `array_term_members` has bits."""
TERM_LIMIT = 1 << 31
RESERVED_BYTES = 2536

SUPERBLOCK = StructLayout(
    "superblock",
    [
        Field("checksum", "bytes[16]", "XXH3-128 of bytes 16 to 4095: torn write, bit rot"),
        Field("magic", "bytes[8]", '`"blockkv\\0"`: something else on the device'),
        Field("version", "u32", "1; another version is refused"),
        Field("slot_index", "u32", "0 to 3 head, 4 to 7 tail: misdirected I/O"),
        Field("uuid", "bytes[16]", "identity of the store; every page repeats it. Never the device path"),
        Field(
            "generation", "u64", "one more with each superblock; the newest wins; equals slot_index modulo 4"
        ),
        Field("incompat", "u64", "features; an unknown bit: refuse to open"),
        Field("ro_compat", "u64", "features; an unknown bit: open read-only"),
        Field("compat", "u64", "features; an unknown bit: ignore and preserve"),
        Field("epoch", "u64", "writable opens so far; see Anchors"),
        Field(
            "device_bytes",
            "u64",
            "device size at format, or when it was last grown: a device that shrank; also places the tail",
        ),
        Field("lba_bytes", "u32", "logical block size at format: 512, 1024, 2048 or 4096"),
        Field("page_bytes", "u32", "4096"),
        Field("run_bytes", "u32", "131072"),
        Field("next_layout_id", "u32", "layout ids below this may be in use"),
        Field("average_chunk_bytes", "u64", "what the checkpoint areas were sized for; for information"),
        Field("checkpoint_a_offset_bytes", "u64", "zone: checkpoint A; a multiple of 1 MiB"),
        Field("checkpoint_a_size_bytes", "u64", "whole pages, the same for A and B"),
        Field("checkpoint_b_offset_bytes", "u64", "zone: checkpoint B; a multiple of 1 MiB"),
        Field("checkpoint_b_size_bytes", "u64", "whole pages"),
        Field("journal_offset_bytes", "u64", "zone: journal; a multiple of 1 MiB"),
        Field("journal_size_bytes", "u64", "whole pages, at least 6"),
        Field("data_offset_bytes", "u64", "zone: data; a multiple of 1 MiB"),
        Field("data_size_bytes", "u64", "whole runs"),
        Field("checkpoint_id", "bytes[16]", "random; every page of the checkpoint repeats it"),
        Field("checkpoint_page_count", "u64", "pages of the checkpoint; page i lies at i in its area"),
        Field("checkpoint_record_count", "u64", "records in them; what a damaged page cost"),
        Field("log_sequence", "u64", "the last log sequence the checkpoint includes"),
        Field("replay_from_sequence", "u64", "anchor: first journal sequence to replay, at least 1"),
        Field("replay_predecessor", "bytes[16]", "anchor: checksum that page names as its predecessor"),
        Field("epoch_start_sequence", "u64", "anchor: from here on only pages of this epoch are real"),
        Field("checkpoint_area", "u32", "0: A, 1: B"),
        Field("clean", "u32", "1 after close, 0 while open; a hint, nothing depends on it"),
        Field("holder_pid", "u32", "last writable opener, for messages only"),
        Field("holder_boot_id", "text[36]", "its boot id"),
        Field("holder_host", "text[64]", "its host name"),
        Field(
            "namespace_nguid", "bytes[16]", "NVMe identity at last open, zero if unknown: clones and moves"
        ),
        Field("namespace_eui64", "bytes[8]", "likewise"),
        Field("namespace_serial", "text[40]", "likewise: serial number"),
        Field("label", "text[64]", "the user's name for the store"),
        Field("scrub_sequence", "u64", "the log sequence a scrub under way has verified up to; 0: none is"),
        Field("array_term", "u32", "member of an array: the newest term it knows, from 1; else 0, checked"),
        Field("array_term_members", "u32", "bit i: member i belongs to that term; else 0, checked"),
        Field("key_slots", "bytes[960]", "encrypted: eight key slots, see there; else 0, checked"),
        Field(
            "header_mac",
            "bytes[32]",
            "encrypted: HMAC-SHA256 of bytes 32 to 4095, this field zero: a header changed without the key; "
            "else 0, checked",
        ),
        Field("cipher", "u32", "encrypted: 1, AES-256-XTS by units of 4096 bytes; else 0, checked"),
        Field("ephemeral", "u32", "1: the volume key was never written down; else 0, checked"),
        Field("encryption_reserved", "zero[24]", "zero, checked"),
        Field("array_uuid", "bytes[16]", "member of an array: identity of the array; else 0, checked"),
        Field("array_member_count", "u32", "members it was formatted with, 2 to 32; else 0, checked"),
        Field("array_member_index", "u32", "which one this is, from 0: swapped devices; else 0, checked"),
        Field("reserved", "bytes[2536]", "zero, checked unless an unknown compat or ro_compat bit is set"),
    ],
    size_bytes=PAGE_BYTES,
)
CIPHER_AES_256_XTS = 1
_CHECKSUM_BYTES = 16
_AUTHENTICATED_FROM = SUPERBLOCK.offsets["uuid"]
"""The code is the same in both copies of a superblock: it leaves out in which slot it is."""
_MAC_OFFSET = SUPERBLOCK.offsets["header_mac"]
_FROZEN = struct.Struct("<16s8sII16sQQQQ")
"""Checksum to compat: the part every later version keeps."""


class SuperblockFault(enum.Enum):
    """Every reason for which a slot is not believed, in the order of the checks."""

    UNREADABLE = "could not be read"
    BLANK = "is blank"
    NOT_OURS = "holds something else"
    TORN = "has a wrong checksum: torn or rotten"
    WRONG_SLOT = "was written to another slot"
    VERSION = "was written by another format version"
    INCOMPAT = "uses an unknown incompatible feature"
    SIZES = "has other page or run sizes"
    GEOMETRY = "has impossible zones"
    CHECKPOINT = "names an impossible checkpoint"
    COUNTERS = "has counters out of range"
    ANCHORS = "has impossible anchors"
    FLAGS = "has impossible flags"
    TEXT = "has unprintable text"
    ARRAY = "has an impossible place in an array"
    ENCRYPTION = "has impossible key slots"
    RESERVED = "has non-zero reserved bytes"


class SuperblockRejected(FormatError):
    """A slot is not a usable superblock. `fault` says why; the rest is set for VERSION and INCOMPAT."""

    def __init__(
        self, fault: SuperblockFault, detail: str = "", generation: int = 0, uuid: bytes = b""
    ) -> None:
        super().__init__(fault.value + (f": {detail}" if detail else ""))
        self.fault = fault
        self.generation = generation
        self.uuid = uuid


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a store in an array, and the newest term it knows. Terms: `blockkv.store.array_term`."""

    array_uuid: bytes
    member_count: int
    """Members the array was formatted with."""
    member_index: int
    """Which one this is, from 0."""
    term: int
    term_members: int
    """Bit i: member i belongs to the term. Whoever does not holds nothing that counts."""

    @property
    def array_uuid_text(self) -> str:
        """The array's identity as it is usually written."""
        return str(uuids.UUID(bytes=self.array_uuid))


@dataclass(frozen=True, slots=True)
class Encryption:
    """How a store is encrypted. The volume key is in none of this."""

    slots: tuple[KeySlot | None, ...]
    ephemeral: bool
    """The volume key is in the memory of the process that opened the store, and nowhere else."""
    mac: bytes = field(default=bytes(32), compare=False)
    """The authentication code that was found on the device."""
    mac_key: bytes = field(default=b"", repr=False, compare=False)
    """Derived from the volume key; empty until the store is unlocked. Without it nothing is encoded."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a valid slot says. Make the next one with `dataclasses.replace`, generation one higher."""

    uuid: bytes
    generation: int
    epoch: int
    geometry: Geometry
    checkpoint_area: int
    """0 for area A, 1 for area B."""
    checkpoint_id: bytes
    checkpoint_page_count: int
    checkpoint_record_count: int
    log_sequence: int
    replay_from_sequence: int
    replay_predecessor: bytes
    epoch_start_sequence: int
    clean: bool
    next_layout_id: int = 1
    average_chunk_bytes: int = 0
    holder_boot_id: str = ""
    holder_pid: int = 0
    holder_host: str = ""
    namespace_nguid: bytes = bytes(16)
    namespace_eui64: bytes = bytes(8)
    namespace_serial: str = ""
    label: str = ""
    scrub_sequence: int = 0
    incompat: int = 0
    ro_compat: int = 0
    compat: int = 0
    array: Membership | None = None
    """Its place in an array, if it is a member of one. The bit that announces it is not in `incompat`."""
    encryption: Encryption | None = None
    """How it is encrypted, if it is. Likewise."""
    reserved: bytes = bytes(RESERVED_BYTES)
    """Belongs to features this version does not know; carried along unchanged."""

    @property
    def uuid_text(self) -> str:
        """The store's identity as it is usually written."""
        return str(uuids.UUID(bytes=self.uuid))

    @property
    def read_only_reason(self) -> str | None:
        """Why this version must not write to the store, or None where it may."""
        unknown = self.ro_compat & ~KNOWN_RO_COMPAT
        if not unknown:
            return None
        return f"the store uses features this version cannot write (ro_compat {unknown:#x}); upgrade blockkv"

    @property
    def checkpoint_zone(self) -> Zone:
        """The area that holds the current checkpoint; the other one is free to be written."""
        return self.geometry.checkpoints[self.checkpoint_area]

    def encode(self, slot_index: int) -> bytes:
        """The 4096 bytes of one slot.

        Raises InvalidArgument when a field does not fit: a label that is too long or not printable, a slot
        that does not belong to this generation.
        """
        if slot_index not in slots_of(self.generation):
            raise InvalidArgument(f"generation {self.generation} does not go to slot {slot_index}")
        geometry = self.geometry
        zones = {
            "checkpoint_a": geometry.checkpoint_a,
            "checkpoint_b": geometry.checkpoint_b,
            "journal": geometry.journal,
            "data": geometry.data,
        }
        values: dict[str, int | bytes | str] = {}
        for name, zone in zones.items():
            values[f"{name}_offset_bytes"] = zone.offset_bytes
            values[f"{name}_size_bytes"] = zone.size_bytes
        for name in _PLAIN_FIELDS:
            values[name] = getattr(self, name)
        values |= _array_values(self.array) | _encryption_values(self.encryption)
        packed = SUPERBLOCK.pack(
            checksum=bytes(_CHECKSUM_BYTES),
            magic=MAGIC,
            version=FORMAT_VERSION,
            slot_index=slot_index,
            device_bytes=geometry.device_bytes,
            lba_bytes=geometry.lba_bytes,
            page_bytes=PAGE_BYTES,
            run_bytes=RUN_BYTES,
            clean=int(self.clean),
            incompat=self.incompat
            | (INCOMPAT_ARRAY if self.array else 0)
            | (INCOMPAT_ENCRYPTION if self.encryption else 0),
            holder_boot_id=_fit_text(self.holder_boot_id, 36),
            holder_host=_fit_text(self.holder_host, 64),
            namespace_serial=_fit_text(self.namespace_serial, 40),
            **values,
        )
        if self.encryption:
            assert self.encryption.mac_key, "the store was not unlocked"
            code = hmac.digest(self.encryption.mac_key, packed[_AUTHENTICATED_FROM:], "sha256")
            packed = packed[:_MAC_OFFSET] + code + packed[_MAC_OFFSET + len(code) :]
        content = packed[_CHECKSUM_BYTES:]
        return xxh3_128_digest(content) + content

    def unlocked(self, mac_key: bytes) -> Superblock | None:
        """The same with the key, so that it can be encoded; None where it was not written with that key."""
        assert self.encryption
        with_key = replace(self, encryption=replace(self.encryption, mac_key=mac_key))
        code = with_key.encode(slots_of(self.generation)[0])[_MAC_OFFSET:][: len(self.encryption.mac)]
        return with_key if hmac.compare_digest(code, self.encryption.mac) else None


_PLAIN_FIELDS = (
    "uuid",
    "generation",
    "ro_compat",
    "compat",
    "epoch",
    "next_layout_id",
    "average_chunk_bytes",
    "checkpoint_id",
    "checkpoint_page_count",
    "checkpoint_record_count",
    "log_sequence",
    "replay_from_sequence",
    "replay_predecessor",
    "epoch_start_sequence",
    "checkpoint_area",
    "holder_pid",
    "namespace_nguid",
    "namespace_eui64",
    "label",
    "scrub_sequence",
    "reserved",
)
"""Fields that are in memory what they are on disk."""


_COUNTERS = (
    "generation",
    "epoch",
    "log_sequence",
    "replay_from_sequence",
    "epoch_start_sequence",
    "scrub_sequence",
)


def slots_of(generation: int) -> tuple[int, int]:
    """The two slots of a generation: (head, tail). Write the head and flush before writing the tail."""
    return generation % SLOTS_PER_COPY, SLOTS_PER_COPY + generation % SLOTS_PER_COPY


def decode(data: bytes, slot_index: int) -> Superblock:
    """The superblock in the bytes of slot `slot_index`.

    Raises SuperblockRejected. Data of another length than a slot, as after a failed read, are UNREADABLE.
    """
    if len(data) != PAGE_BYTES:
        raise SuperblockRejected(SuperblockFault.UNREADABLE, f"{len(data)} bytes")
    checksum, magic, version, its_slot, uuid, generation, incompat, ro_compat, compat = _FROZEN.unpack_from(
        data
    )
    if magic != MAGIC:
        raise SuperblockRejected(SuperblockFault.NOT_OURS if any(data) else SuperblockFault.BLANK)
    if xxh3_128_digest(memoryview(data)[_CHECKSUM_BYTES:]) != checksum:
        raise SuperblockRejected(SuperblockFault.TORN)
    if its_slot != slot_index:
        raise SuperblockRejected(SuperblockFault.WRONG_SLOT, f"{its_slot} instead of {slot_index}")
    if version != FORMAT_VERSION:
        raise SuperblockRejected(
            SuperblockFault.VERSION, f"{version}; this is version {FORMAT_VERSION}", generation, uuid
        )
    if incompat & ~KNOWN_INCOMPAT:
        raise SuperblockRejected(SuperblockFault.INCOMPAT, f"incompat {incompat:#x}", generation, uuid)
    try:
        values = SUPERBLOCK.unpack_from(data)
    except FieldRejected as error:
        fault = SuperblockFault.TEXT if error.field.kind == "text" else SuperblockFault.RESERVED
        raise SuperblockRejected(fault, str(error)) from None
    if values["page_bytes"] != PAGE_BYTES or values["run_bytes"] != RUN_BYTES:
        raise SuperblockRejected(
            SuperblockFault.SIZES, f"page {values['page_bytes']}, run {values['run_bytes']}"
        )
    geometry = _geometry_of(values)
    try:
        geometries.validate(geometry)
    except FormatError as error:
        raise SuperblockRejected(SuperblockFault.GEOMETRY, str(error)) from None
    if slot_index not in slots_of(generation):
        raise SuperblockRejected(SuperblockFault.WRONG_SLOT, f"generation {generation} in slot {slot_index}")
    _check_values(values, geometry)
    array, encryption = _membership_of(values), _encryption_of(values)
    unknown = (ro_compat & ~KNOWN_RO_COMPAT) | (compat & ~KNOWN_COMPAT)
    if not unknown and any(values["reserved"]):
        raise SuperblockRejected(SuperblockFault.RESERVED, "field reserved")
    return Superblock(
        geometry=geometry,
        clean=bool(values["clean"]),
        holder_boot_id=values["holder_boot_id"],
        holder_host=values["holder_host"],
        namespace_serial=values["namespace_serial"],
        incompat=incompat & ~KNOWN_INCOMPAT,
        array=array,
        encryption=encryption,
        **{name: values[name] for name in _PLAIN_FIELDS},
    )


def _array_values(array: Membership | None) -> dict[str, int | bytes]:
    return {
        "array_term": array.term if array else 0,
        "array_term_members": array.term_members if array else 0,
        "array_uuid": array.array_uuid if array else bytes(16),
        "array_member_count": array.member_count if array else 0,
        "array_member_index": array.member_index if array else 0,
    }


def _membership_of(values: dict[str, Any]) -> Membership | None:
    term, term_members = values["array_term"], values["array_term_members"]
    array_uuid, count = values["array_uuid"], values["array_member_count"]
    index = values["array_member_index"]
    if not values["incompat"] & INCOMPAT_ARRAY:
        if term or term_members or count or index or any(array_uuid):
            raise SuperblockRejected(
                SuperblockFault.RESERVED, "fields of an array, and it is no member of one"
            )
        return None
    if not (
        2 <= count <= MAX_MEMBERS
        and index < count
        and 0 < term < TERM_LIMIT
        and 0 < term_members < 1 << count
        and any(array_uuid)
    ):
        raise SuperblockRejected(
            SuperblockFault.ARRAY,
            f"member {index} of {count}, term {term} with members {term_members:#x}",
        )
    return Membership(array_uuid, count, index, term, term_members)


def _encryption_values(encryption: Encryption | None) -> dict[str, int | bytes]:
    return {
        "key_slots": key_slots.encode(encryption.slots) if encryption else bytes(KEY_SLOTS_BYTES),
        "header_mac": bytes(32),
        "cipher": CIPHER_AES_256_XTS if encryption else 0,
        "ephemeral": int(bool(encryption and encryption.ephemeral)),
    }


def _encryption_of(values: dict[str, Any]) -> Encryption | None:
    cipher, ephemeral, mac = values["cipher"], values["ephemeral"], values["header_mac"]
    if not values["incompat"] & INCOMPAT_ENCRYPTION:
        if cipher or ephemeral or any(mac) or any(values["key_slots"]):
            raise SuperblockRejected(
                SuperblockFault.RESERVED, "fields of encryption, and it is not encrypted"
            )
        return None
    try:
        slots = key_slots.decode(values["key_slots"])
    except FormatError as error:
        raise SuperblockRejected(SuperblockFault.ENCRYPTION, str(error)) from None
    if cipher != CIPHER_AES_256_XTS or ephemeral > 1 or bool(ephemeral) == any(slots):
        used = sum(slot is not None for slot in slots)
        raise SuperblockRejected(
            SuperblockFault.ENCRYPTION, f"cipher {cipher}, ephemeral {ephemeral}, {used} key slots in use"
        )
    return Encryption(slots, bool(ephemeral), mac)


def _geometry_of(values: dict[str, Any]) -> Geometry:
    def zone(name: str) -> Zone:
        return Zone(values[f"{name}_offset_bytes"], values[f"{name}_size_bytes"])

    return Geometry(
        device_bytes=values["device_bytes"],
        lba_bytes=values["lba_bytes"],
        checkpoint_a=zone("checkpoint_a"),
        checkpoint_b=zone("checkpoint_b"),
        journal=zone("journal"),
        data=zone("data"),
    )


def _check_values(values: dict[str, Any], geometry: Geometry) -> None:
    pages, records = values["checkpoint_page_count"], values["checkpoint_record_count"]
    area = values["checkpoint_area"]
    if area > 1 or pages > geometry.checkpoint_pages or records > pages * PAGE_PAYLOAD_BYTES // 8:
        raise SuperblockRejected(
            SuperblockFault.CHECKPOINT,
            f"area {area}, {records} records in {pages} of {geometry.checkpoint_pages} pages",
        )
    for name in _COUNTERS:
        if values[name] >= COUNTER_LIMIT:
            raise SuperblockRejected(SuperblockFault.COUNTERS, f"{name} {values[name]}")
    replay_from, epoch_start = values["replay_from_sequence"], values["epoch_start_sequence"]
    if not replay_from or epoch_start > replay_from + geometry.journal_pages:
        raise SuperblockRejected(
            SuperblockFault.ANCHORS,
            f"replay from {replay_from}, epoch starts at {epoch_start}, {geometry.journal_pages} pages",
        )
    if values["clean"] > 1:
        raise SuperblockRejected(SuperblockFault.FLAGS, f"clean {values['clean']}")


def examine(slots: Sequence[bytes]) -> list[Superblock | SuperblockRejected]:
    """What each of the eight slots holds, in slot order: for `newest_of` and for inspection."""
    if len(slots) != SLOT_COUNT:
        raise InvalidArgument(f"{len(slots)} slots instead of {SLOT_COUNT}")
    found: list[Superblock | SuperblockRejected] = []
    for slot_index, data in enumerate(slots):
        try:
            found.append(decode(data, slot_index))
        except SuperblockRejected as rejected:
            found.append(rejected)
    return found


def choose(slots: Sequence[bytes]) -> Superblock:
    """The newest valid superblock of the eight slots, in slot order (head 0 to 3, tail 4 to 7).

    A slot that could not be read is passed as `b""`. Raises as `newest_of`.
    """
    return newest_of(examine(slots))


def newest_of(found: Sequence[Superblock | SuperblockRejected]) -> Superblock:
    """The newest superblock among what `examine` found.

    The head decides which store it is. What else lies at the end of a device that has grown, or that a
    smaller image was copied to, is told from it by its uuid, and by a generation that no tail can be ahead
    of the head by, whichever slots of that are damaged.

    Raises NotFormatted when no slot is valid, and VersionTooNew when the newest slot was written by another
    format version or uses a feature this one does not know. With an unknown ro_compat feature the result has
    a `read_only_reason`.
    """
    newest: Superblock | None = None
    too_new: SuperblockRejected | None = None
    head = max((slot for slot in found[:SLOTS_PER_COPY] if slot.uuid), key=_generation_of, default=None)
    for slot in found:
        if head is not None and (
            slot.uuid != head.uuid or slot.generation >= head.generation + SLOTS_PER_COPY
        ):
            continue
        if isinstance(slot, Superblock):
            if newest is None or slot.generation > newest.generation:
                newest = slot
        elif slot.fault in (SuperblockFault.VERSION, SuperblockFault.INCOMPAT) and (
            too_new is None or slot.generation > too_new.generation
        ):
            too_new = slot
    if too_new is not None and (newest is None or too_new.generation > newest.generation):
        raise VersionTooNew(f"superblock generation {too_new.generation} {too_new}; upgrade blockkv")
    if newest is None:
        raise NotFormatted(_describe(found))
    return newest


def _generation_of(slot: Superblock | SuperblockRejected) -> int:
    return slot.generation


def _describe(found: Sequence[Superblock | SuperblockRejected]) -> str:
    if all(isinstance(slot, SuperblockRejected) and slot.fault is SuperblockFault.BLANK for slot in found):
        return "no blockkv superblock: all eight slots are blank; `blockkv format` makes a store"
    reasons = "; ".join(f"slot {slot_index} {slot}" for slot_index, slot in enumerate(found))
    return f"no valid blockkv superblock: {reasons}"


def _fit_text(text: str, limit_bytes: int) -> str:
    """`text` made printable and cut to fit: for fields that only ever appear in messages."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable.encode(errors="replace")[:limit_bytes].decode(errors="ignore")
