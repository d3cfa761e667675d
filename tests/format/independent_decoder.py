"""A second reader of the format, written from docs/format.md alone.

It shares no code with the package: only struct, hashlib, xxhash and AES. It reads whole images the slow,
obvious way, and raises Refused where the document says MUST refuse.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import xxhash
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import XTS

MIB = 1 << 20
PAGE = 4096


class Refused(Exception):
    """The bytes are not what was asked for."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def u16(data: bytes, offset: int) -> int:
    return struct.unpack("<H", data[offset : offset + 2])[0]


def u32(data: bytes, offset: int) -> int:
    return struct.unpack("<I", data[offset : offset + 4])[0]


def u64(data: bytes, offset: int) -> int:
    return struct.unpack("<Q", data[offset : offset + 8])[0]


def text(data: bytes, offset: int, size: int) -> str:
    return data[offset : offset + size].split(b"\0")[0].decode()


def checksum(data: bytes) -> bytes:
    return xxhash.xxh3_128(data, seed=0).digest()


def superblock(slot: bytes, slot_index: int) -> dict[str, Any]:
    need(len(slot) == PAGE, "slot length")
    need(slot[16:24] == b"blockkv\0", "magic")
    need(slot[0:16] == checksum(slot[16:]), "checksum")
    need(u32(slot, 24) == 1, "version")
    need(u32(slot, 28) == slot_index, "slot")
    need(u64(slot, 56) in (0, 1, 2, 3), "incompat feature")
    need(u32(slot, 100) == 4096, "page size")
    need(u32(slot, 104) == 131072, "run size")
    if u64(slot, 56) & 1:
        need(u32(slot, 1504) == 1, "cipher")
        need(u32(slot, 1508) in (0, 1) and not any(slot[1512:1536]), "encryption")
    else:
        need(not any(slot[512:1536]), "reserved")
    array = None
    if u64(slot, 56) & 2:
        array = {
            "array_uuid": slot[1536:1552],
            "member_count": u32(slot, 1552),
            "member_index": u32(slot, 1556),
            "term": u32(slot, 504),
            "term_members": u32(slot, 508),
        }
        need(2 <= array["member_count"] <= 32 and array["member_index"] < array["member_count"], "member")
        need(0 < array["term"] < 1 << 31 and any(array["array_uuid"]), "term")
        need(0 < array["term_members"] < 1 << array["member_count"], "members of the term")
    else:
        need(not any(slot[504:512]) and not any(slot[1536:1560]), "no array")
    return {
        "uuid": slot[32:48],
        "generation": u64(slot, 48),
        "incompat": u64(slot, 56),
        "ro_compat": u64(slot, 64),
        "compat": u64(slot, 72),
        "epoch": u64(slot, 80),
        "device_bytes": u64(slot, 88),
        "lba_bytes": u32(slot, 96),
        "next_layout_id": u32(slot, 108),
        "average_chunk_bytes": u64(slot, 112),
        "checkpoint_a": (u64(slot, 120), u64(slot, 128)),
        "checkpoint_b": (u64(slot, 136), u64(slot, 144)),
        "journal": (u64(slot, 152), u64(slot, 160)),
        "data": (u64(slot, 168), u64(slot, 176)),
        "checkpoint_id": slot[184:200],
        "checkpoint_page_count": u64(slot, 200),
        "checkpoint_record_count": u64(slot, 208),
        "log_sequence": u64(slot, 216),
        "replay_from_sequence": u64(slot, 224),
        "replay_predecessor": slot[232:248],
        "epoch_start_sequence": u64(slot, 248),
        "checkpoint_area": u32(slot, 256),
        "clean": u32(slot, 260) == 1,
        "holder_pid": u32(slot, 264),
        "holder_boot_id": text(slot, 268, 36),
        "holder_host": text(slot, 304, 64),
        "namespace_nguid": slot[368:384],
        "namespace_eui64": slot[384:392],
        "namespace_serial": text(slot, 392, 40),
        "label": text(slot, 432, 64),
        "scrub_sequence": u64(slot, 496),
        "array": array,
        "reserved": slot[1560:4096],
    }


def page(data: bytes, kind: int, store_id: bytes, sequence: int) -> dict[str, Any]:
    need(len(data) == PAGE, "page length")
    need(data[0:16] == checksum(data[16:]), "checksum")
    need(data[16:32] == store_id, "store")
    need(u16(data, 72) == kind, "kind")
    need(u64(data, 48) == sequence, "sequence")
    body_end = 80 + u16(data, 76)
    need(body_end <= PAGE and not any(data[body_end:]) and not any(data[78:80]), "padding")
    found = {
        "checksum": data[0:16],
        "link": data[32:48],
        "sequence": sequence,
        "epoch": u64(data, 56),
        "sealed_sequence": u64(data, 64),
        "records": [],
    }
    offset = 80
    for _ in range(u16(data, 74)):
        length = u16(data, offset)
        need(length % 8 == 0 and 0 < length <= body_end - offset, "record length")
        found["records"].append(record(data[offset : offset + length]))
        offset += length
    need(offset == body_end, "records do not fill the body")
    return found


def leaf_size(payload_bytes: int) -> int:
    size = 128 * 1024
    while size * 256 < payload_bytes:
        size *= 2
    return size


def record(raw: bytes) -> dict[str, Any]:
    operation = raw[2]
    found: dict[str, Any] = {"operation": operation, "log_sequence": u64(raw, 8)}
    if operation == 1:
        payload_bytes = u64(raw, 48)
        extents = []
        for index in range(raw[3]):
            word = u64(raw, 76 + 8 * index)
            extents.append((word % (1 << 40), word >> 40))
        need(sum(count for _, count in extents) == (payload_bytes + 4095) // 4096, "extents")
        leaves_start = 76 + 8 * raw[3]
        leaf_count = (payload_bytes + leaf_size(payload_bytes) - 1) // leaf_size(payload_bytes)
        key_start = leaves_start + 8 * leaf_count
        key_bytes = u16(raw, 72)
        key_end = min(key_start + key_bytes, 4016)
        found |= {
            "digest": raw[16:48],
            "payload_bytes": payload_bytes,
            "layout_id": u32(raw, 4),
            "root": raw[56:72],
            "extents": extents,
            "leaves": raw[leaves_start:key_start],
            "key": raw[key_start:key_end],
            "key_bytes_total": key_bytes,
            "key_is_text": raw[74] == 1,
        }
        used = key_end
    elif operation == 2:
        found["digest"] = raw[16:48]
        used = 48
    elif operation == 3:
        used = 18 + u16(raw, 16)
        found |= {"layout_id": u32(raw, 4), "body": raw[18:used]}
    else:
        need(operation == 4, "operation")
        used = 50 + u16(raw, 48)
        found |= {"digest": raw[16:48], "tail": raw[50:used]}
    need(len(raw) == (used + 7) // 8 * 8 and not any(raw[used:]), "record padding")
    return found


def hkdf(secret: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    extracted, found, last = hmac.digest(salt, secret, "sha256"), b"", b""
    while len(found) < size:
        last = hmac.digest(extracted, last + info + bytes([len(found) // 32 + 1]), "sha256")
        found += last
    return found[:size]


def decrypted(image: bytes, secret: bytes) -> bytes:
    """An image of an encrypted store as one that is not, but for what its superblocks say."""
    current = newest_superblock(image)
    generation = current["generation"]
    offset = generation % 4 * 256 * 1024
    slot, uuid = image[offset : offset + PAGE], current["uuid"]
    volume_key = None
    for start in range(512, 512 + 960, 120):
        one = slot[start : start + 120]
        if u32(one, 0) == 2:
            gcm = AESGCM(hkdf(secret, one[16:48], b"blockkv 1 slot", 32))
            volume_key = gcm.decrypt(one[48:60], one[60:108], uuid + one[:48])
    need(volume_key is not None, "no slot of a secret")
    assert volume_key is not None
    content = slot[32:1472] + bytes(32) + slot[1504:]
    code = hmac.digest(hkdf(volume_key, uuid, b"blockkv 1 header", 32), content, "sha256")
    need(slot[1472:1504] == code, "header")
    key = hkdf(volume_key, uuid, b"blockkv 1 cipher", 64)
    tail = len(image) // MIB * MIB - MIB
    plain = bytearray(image)
    for offset in range(MIB, tail, PAGE):
        decryptor = Cipher(AES(key), XTS((offset // PAGE).to_bytes(16, "little"))).decryptor()
        plain[offset : offset + PAGE] = decryptor.update(image[offset : offset + PAGE])
    return bytes(plain)


def newest_superblock(image: bytes) -> dict[str, Any]:
    tail = len(image) // MIB * MIB - MIB
    best: dict[str, Any] | None = None
    for slot_index in range(8):
        offset = (slot_index % 4) * 256 * 1024 + (tail if slot_index >= 4 else 0)
        try:
            found = superblock(image[offset : offset + PAGE], slot_index)
        except Refused:
            continue
        if best is None or found["generation"] > best["generation"]:
            best = found
    need(best is not None, "not formatted")
    assert best is not None
    return best


def log_of(image: bytes, current: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of the checkpoint, then those of the journal that it does not include."""
    found = []
    area = current["checkpoint_b" if current["checkpoint_area"] else "checkpoint_a"][0]
    for index in range(current["checkpoint_page_count"]):
        data = image[area + index * PAGE : area + (index + 1) * PAGE]
        one = page(data, 2, current["uuid"], index)
        need(one["link"] == current["checkpoint_id"], "checkpoint id")
        found += one["records"]
    journal, journal_bytes = current["journal"]
    predecessor, epoch = current["replay_predecessor"], 0
    for sequence in range(
        current["replay_from_sequence"], current["replay_from_sequence"] + journal_bytes // PAGE
    ):
        offset = journal + sequence % (journal_bytes // PAGE) * PAGE
        try:
            one = page(image[offset : offset + PAGE], 1, current["uuid"], sequence)
            need(one["link"] == predecessor, "predecessor")
            if sequence >= current["epoch_start_sequence"]:
                need(one["epoch"] == current["epoch"], "epoch")
            else:
                need(epoch <= one["epoch"] < current["epoch"], "epoch")
        except Refused:
            break
        predecessor, epoch = one["checksum"], one["epoch"]
        found += [one for one in one["records"] if one["log_sequence"] > current["log_sequence"]]
    return found


def chunks(image: bytes) -> dict[bytes, bytes]:
    """Key -> payload of every chunk, each verified. Raises Refused for a payload that does not verify."""
    current = newest_superblock(image)
    live: dict[bytes, dict[str, Any]] = {}
    layouts: dict[int, bytes] = {}
    for one in log_of(image, current):
        if one["operation"] == 1:
            live[one["digest"]] = one
        elif one["operation"] == 2:
            live.pop(one["digest"], None)
        elif one["operation"] == 3:
            layouts[one["layout_id"]] = one["body"]
        elif one["digest"] in live:
            live[one["digest"]]["key"] += one["tail"]
    return {
        one["key"]: verified_payload(image, current, one, layouts[one["layout_id"]]) for one in live.values()
    }


def verified_payload(image: bytes, current: dict[str, Any], put: dict[str, Any], layout: bytes) -> bytes:
    need(hashlib.blake2b(put["key"], digest_size=32).digest() == put["digest"], "digest of the key")
    data = current["data"][0]
    stored = b"".join(
        image[data + start * PAGE : data + (start + count) * PAGE] for start, count in put["extents"]
    )
    payload, padding = stored[: put["payload_bytes"]], stored[put["payload_bytes"] :]
    need(not any(padding), "padding of the last unit")
    size = leaf_size(len(payload))
    leaves = b"".join(
        struct.pack("<Q", xxhash.xxh3_64(payload[start : start + size], seed=0).intdigest())
        for start in range(0, len(payload), size)
    )
    need(leaves == put["leaves"], "leaves")
    content = put["digest"] + struct.pack("<Q", len(payload)) + checksum(layout) + leaves
    need(checksum(content) == put["root"], "root")
    return payload
