"""Encrypted stores: what lies on the device, what opens them, and what a change without the key does."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

import blockkv
from blockkv.device.engine import NativeDevice
from blockkv.device.unit_cipher import UnitCipher
from blockkv.encryption.secret import Secret, parse_unlock
from blockkv.encryption.volume_key import VolumeKey, wrap
from blockkv.errors import FormatError, InvalidArgument, NotFormatted, WrongKey, WrongStore
from blockkv.format import key_slots, superblock
from blockkv.format.geometry import MEBIBYTE, PAGE_BYTES, SLOTS_PER_COPY, Geometry, slot_offsets
from blockkv.format.record import key_digest
from blockkv.format.superblock import SUPERBLOCK
from blockkv.store.wipe import Method
from blockkv.testing import Crash, SimulatedDevice

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
SIZE_BYTES = 32 << 20
KEY = "family/what-was-asked-of-the-doctor"
PATTERN = struct.pack("<4Q", 0x1122334455667788, 0x99AABBCCDDEEFF01, 0x0F1E2D3C4B5A6978, 0x8796A5B4C3D2E1F0)


def pattern(size_bytes: int) -> torch.Tensor:
    """Payload in which every 32 bytes can be told."""
    repeats = -(-size_bytes // len(PATTERN))
    return torch.frombuffer(bytearray(PATTERN * repeats), dtype=torch.uint8)[:size_bytes].clone()


def assert_no_plaintext(image: bytes) -> None:
    assert PATTERN not in image
    for start in (0, 5, 16, 21):  # an AES block of it, wherever that begins
        assert (PATTERN * 2)[start : start + 16] not in image
    assert KEY.encode() not in image
    assert KEY.encode()[7:] not in image
    assert key_digest(KEY.encode()) not in image


def cipher_of(key: bytes, shape: Geometry) -> UnitCipher:
    return UnitCipher(key, shape.encrypted_zone.offset_bytes, shape.encrypted_zone.end_bytes)


def fail_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on no write of metadata to a real device arrives."""
    write, left = NativeDevice.write, [writes]

    def cut_short(self: NativeDevice, offset_bytes: int, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise blockkv.DeviceError("the power failed")
        write(self, offset_bytes, data)

    monkeypatch.setattr(NativeDevice, "write", cut_short)


def blank(**options: object) -> SimulatedDevice:
    return SimulatedDevice(SIZE_BYTES, strict=True, **options)  # type: ignore[arg-type]


@pytest.fixture
def device() -> SimulatedDevice:
    made = blank()
    blockkv.format(made, average_chunk="64KiB", encrypt=SECRET)
    return made


def opened(device: SimulatedDevice, unlock: object = SECRET, **options: object) -> blockkv.Store:
    """The store on a copy of the device."""
    return at(device.clone(), unlock, **options)


def at(device: SimulatedDevice, unlock: object = SECRET, **options: object) -> blockkv.Store:
    """The store on the device itself, which is closed with it."""
    return blockkv.open(device, unlock=unlock, commit_interval_ms=None, **options)  # type: ignore[arg-type]


# -- on real devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_the_device_holds_no_plaintext(block_targets: Callable[[int], Path], engine: str) -> None:
    path = block_targets(64 << 20)
    blockkv.format(path, average_chunk="64KiB", size=64 << 20 if not path.exists() else None, encrypt=SECRET)
    sizes = [1, 4095, 4096, 70_000, 131_072, 1_000_001, 6 << 20]
    with blockkv.open(path, unlock=SECRET, engine=engine) as store:  # type: ignore[arg-type]
        store.put_many([(f"{KEY}/{size}", pattern(size)) for size in sizes], durable=True)
        store.put(KEY, {"k": pattern(300_000), "v": pattern(5)}, durable=True)
        store.checkpoint()
        for size in sizes:
            assert torch.equal(store.get(f"{KEY}/{size}"), pattern(size))
        with pytest.raises(InvalidArgument, match="is encrypted: nobody else"):
            store.extents(KEY)
        assert store.stats()["direct_bytes"] < 1 << 20  # none but the superblocks, before it was unlocked
    with blockkv.open(path, unlock=SECRET, engine=engine) as store:  # type: ignore[arg-type]
        assert not store.check(payload=True).findings
        for size in sizes:
            assert torch.equal(store.get(f"{KEY}/{size}"), pattern(size))
        assert torch.equal(store.get(KEY)["k"], pattern(300_000))
        cipher_key, shape = store._state.device.cipher_key, store._state.geometry
    image = path.read_bytes()
    assert_no_plaintext(image)
    # what is there is AES-256-XTS by another implementation
    plain = cipher_of(cipher_key, shape).decrypt(0, image[: len(image) // 4096 * 4096])
    assert PATTERN * 1000 in plain
    assert KEY.encode() in plain
    assert key_digest(KEY.encode()) in plain


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_pieces_of_any_size_and_place(loop_device: Callable[..., Path], sector_bytes: int) -> None:
    """Small chunks packed together, misaligned memory, parts, growing chunks: what takes other ways."""
    path = loop_device(128 << 20, sector_bytes)
    blockkv.format(path, average_chunk="16KiB", encrypt=SECRET)
    dice = random.Random(sector_bytes)
    memory = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    with blockkv.open(path, unlock=SECRET) as store:
        wanted = {}
        for number in range(300):
            start, size = dice.randrange(1 << 20), dice.choice([1, 100, 4096, 5000, 16384, 99_999, 524_288])
            wanted[str(number)] = memory[start : start + size]
        store.put_many(list(wanted.items()))
        with store.reserve("grown", 3 << 20) as grown:
            position = 0
            while position < 3 << 20:
                size = min(dice.randrange(1, 200_000), (3 << 20) - position)
                grown.append(memory[position : position + size])
                position += size
            grown.seal()
        for round_ in range(2):
            found = store.get_many(list(wanted))
            assert all(torch.equal(one, wanted[key]) for key, one in zip(wanted, found, strict=True)), round_
            out = torch.zeros(1 << 20, dtype=torch.uint8)
            for key in dice.sample(list(wanted), 40):
                shift = dice.randrange(7)
                into = out[shift : shift + len(wanted[key])]
                assert store.get(key, out=into) is not None
                assert torch.equal(into, wanted[key])
        assert torch.equal(store.get("grown"), memory[: 3 << 20])
        store.scrub()
        assert store.stats()["scrub_damaged"] == 0


# -- what opens it ---------------------------------------------------------------------------------------


def test_the_c_and_the_python_cipher_agree_about_the_range(device: SimulatedDevice) -> None:
    with opened(device) as store:
        shape = store._state.geometry
        zone = shape.encrypted_zone
        assert (zone.offset_bytes, zone.end_bytes) == (MEBIBYTE, slot_offsets(SIZE_BYTES)[SLOTS_PER_COPY])
        assert store.info()["encryption"] == {
            "cipher": "aes-256-xts",
            "ephemeral": False,
            "key_slots": {"0": "secret"},
        }


@pytest.mark.parametrize(
    ("unlock", "says"),
    [
        (None, "holds the encrypted store .* say what opens it"),
        (OTHER, "the secret given opens none of the key slots .* \\(secret\\)"),
        (blockkv.Passphrase("sesame"), "the passphrase given opens none"),
        ("key-file:/nowhere", "/nowhere: what unlocks the store cannot be read"),
    ],
)
def test_nothing_else_opens_it(device: SimulatedDevice, unlock: object, says: str) -> None:
    before = device.operation_count
    with pytest.raises(WrongKey, match=says):
        opened(device, unlock)
    assert not any(one.kind.name == "WRITE" for one in device.operations()[before:])


@pytest.mark.parametrize(
    ("unlock", "says"),
    [
        (b"short", "a secret of 5 bytes"),
        ("key-file:", "names nothing"),
        ("sesame", "names nothing"),
        (7, "int unlocks nothing"),
    ],
)
def test_what_cannot_be_a_secret(device: SimulatedDevice, unlock: object, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        opened(device, unlock)
    with pytest.raises(InvalidArgument, match="the passphrase is empty"):
        blockkv.Passphrase("")


def test_a_store_that_was_put_in_its_place_is_refused() -> None:
    """Or what is meant to be encrypted would be written in the clear."""
    device = blank()
    blockkv.format(device)
    with pytest.raises(WrongKey, match="which is not encrypted"):
        opened(device)


def test_the_environment_names_what_opens(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    monkeypatch.setenv("BLOCKKV_UNLOCK", f"key-file:{tmp_path / 'key'}")
    opened(device, None).close()
    plain = blank()
    blockkv.format(plain)
    opened(plain, None).close()  # it is for those that are encrypted
    with pytest.raises(WrongKey):
        opened(device, OTHER)


def test_a_passphrase_is_stretched(tmp_path: Path) -> None:
    device = blank()
    blockkv.format(device, encrypt=blockkv.Passphrase("correct horse"))
    (slot,) = blockkv.key_slots(device)
    assert (slot["kind"], slot["memory_kib"], slot["passes"], slot["lanes"]) == ("passphrase", 65536, 3, 4)
    file = tmp_path / "passphrase"
    file.write_text("correct horse\nanother line\n")
    opened(device, f"passphrase-file:{file}").close()
    with pytest.raises(WrongKey):
        opened(device, blockkv.Passphrase("correct horse "))
    with pytest.raises(WrongKey):
        opened(device, SECRET)


def test_secrets_are_in_no_message(device: SimulatedDevice) -> None:
    given = blockkv.Passphrase("sesame-open")
    assert "sesame" not in repr(given)
    assert "sesame" not in repr(parse_unlock(given))
    assert SECRET.hex() not in repr(Secret(SECRET))
    with opened(device) as store:
        found = store._state.log.superblock
        assert found.encryption is not None
        assert found.encryption.mac_key
        assert repr(found.encryption.mac_key) not in repr(found)
        assert "cipher_key" not in str(store.info())


# -- key slots -------------------------------------------------------------------------------------------


def with_a_chunk(device: SimulatedDevice, size_bytes: int) -> SimulatedDevice:
    with at(device) as store:
        store.put("a", pattern(size_bytes), durable=True)
    return device.clone()


def test_slots_are_added_and_removed(device: SimulatedDevice) -> None:
    device = with_a_chunk(device, 5000)
    first = superblock.choose(slots_of(device)).encryption
    assert first is not None
    assert blockkv.add_key_slot(device, OTHER, unlock=SECRET) == [1]
    for unlock in (SECRET, OTHER):
        with opened(device, unlock) as store:
            assert torch.equal(store.get("a"), pattern(5000))
    with pytest.raises(InvalidArgument, match="key slot 0 is the one that opened the store"):
        blockkv.remove_key_slot(device, 0, unlock=SECRET)
    with pytest.raises(InvalidArgument, match="key slot 5 is not in use"):
        blockkv.remove_key_slot(device, 5, unlock=SECRET)
    with pytest.raises(WrongKey):
        blockkv.remove_key_slot(device, 0, unlock=bytes(32))
    blockkv.remove_key_slot(device, 0, unlock=OTHER)
    assert [row["slot"] for row in blockkv.key_slots(device)] == [1]
    with pytest.raises(WrongKey):
        opened(device, SECRET)
    with opened(device, OTHER) as store:
        assert torch.equal(store.get("a"), pattern(5000))
    assert first.slots[0] is not None
    assert not any(first.slots[0].wrapped in slot for slot in slots_of(device))


def test_all_slots_can_be_in_use(device: SimulatedDevice) -> None:
    secrets = [bytes([number]) * 32 for number in range(1, 8)]
    for secret in secrets:
        blockkv.add_key_slot(device, secret, unlock=SECRET)
    with pytest.raises(InvalidArgument, match="all 8 key slots are in use"):
        blockkv.add_key_slot(device, OTHER, unlock=SECRET)
    for secret in secrets:
        opened(device, secret).close()


def test_a_secret_is_added_once(device: SimulatedDevice) -> None:
    """With two slots of it, whoever removes one would believe that it opens nothing any more."""
    before = slots_of(device)
    with pytest.raises(InvalidArgument, match="opens the store already, by key slot 0"):
        blockkv.add_key_slot(device, SECRET, unlock=SECRET)
    assert slots_of(device) == before


def test_slots_are_of_encrypted_stores() -> None:
    device = blank()
    blockkv.format(device)
    for change in (lambda: blockkv.key_slots(device), lambda: blockkv.add_key_slot(device, OTHER)):
        with pytest.raises(WrongKey, match="is not encrypted"):
            change()


def test_a_change_of_slots_that_was_cut_short(device: SimulatedDevice) -> None:
    """At every write and flush: the store opens with what opened it before."""
    device = with_a_chunk(device, 5000)
    states: list[SimulatedDevice] = []
    dice = random.Random(3)
    device.before_operation = lambda kind: states.append(device.crash_clone(dice, Crash.POWER_CUT))
    blockkv.add_key_slot(device, OTHER, unlock=SECRET)
    device.before_operation = None
    assert len(states) > 16
    for state in states:
        with at(state) as store:
            assert torch.equal(store.get("a"), pattern(5000))
            assert not store.findings


def test_a_removal_that_was_cut_short_can_be_done_again(device: SimulatedDevice) -> None:
    """At every write and flush; after that no superblock has what was removed."""
    blockkv.add_key_slot(device, OTHER, unlock=SECRET)
    device = device.clone()
    first = superblock.choose(slots_of(device)).encryption
    assert first is not None
    assert first.slots[0] is not None
    states: list[SimulatedDevice] = []
    dice = random.Random(4)
    device.before_operation = lambda kind: states.append(device.crash_clone(dice, Crash.POWER_CUT))
    blockkv.remove_key_slot(device, 0, unlock=OTHER)
    device.before_operation = None
    gone = 0
    for state in states:
        gone += blockkv.key_slots(state.clone())[0]["slot"] != 0
        with contextlib.suppress(InvalidArgument):  # all of it had arrived already
            blockkv.remove_key_slot(state, 0, unlock=OTHER)
        assert not any(first.slots[0].wrapped in slot for slot in slots_of(state))
        with pytest.raises(InvalidArgument, match="key slot 0 is not in use"):
            blockkv.remove_key_slot(state, 0, unlock=OTHER)
    assert gone > 10


def test_key_slots_of_an_array(image_dir: Path) -> None:
    """Cut short between two members it can be done again, and some of the members are not enough."""
    paths = [image_dir / f"{index}.img" for index in range(3)]
    blockkv.format(paths, size=SIZE_BYTES, encrypt=SECRET)
    for change in (
        lambda some: blockkv.add_key_slot(some, OTHER, unlock=SECRET),
        lambda some: blockkv.remove_key_slot(some, 1, unlock=SECRET),
    ):
        for some in (paths[:1], paths[:2], paths[0]):
            with pytest.raises(WrongStore, match="missing: what opens them is changed together"):
                change(some)
        with pytest.MonkeyPatch.context() as patch:
            fail_after(11, patch)  # the first member, and a part of the second
            with pytest.raises(blockkv.DeviceError, match="the power failed"):
                change(paths)
        change(paths)
        kinds = {(row["path"], row["slot"]) for row in blockkv.key_slots(paths)}
        slots = {slot for _, slot in kinds}
        assert len(kinds) == 3 * len(slots)
        assert slots == ({0, 1} if len(kinds) == 6 else {0})
        with pytest.raises(InvalidArgument, match=r"opens the store already|is not in use"):
            change(paths)
    blockkv.open(paths, unlock=SECRET).close()
    with pytest.raises(WrongKey):
        blockkv.open(paths, unlock=OTHER)


# -- what was changed by somebody else -------------------------------------------------------------------


def test_key_slots_that_were_changed_while_a_member_was_away(image_dir: Path) -> None:
    paths = [image_dir / f"{index}.img" for index in range(3)]
    blockkv.format(paths, size=SIZE_BYTES, encrypt=SECRET)
    with blockkv.open(paths[:2], degraded=True, unlock=SECRET) as store:
        store.put("a", pattern(1000), durable=True)
    blockkv.add_key_slot(paths[:2], OTHER, unlock=SECRET)
    blockkv.remove_key_slot(paths[:2], 0, unlock=OTHER)
    for secret in (SECRET, OTHER):
        with pytest.raises(WrongKey, match="key slots may have been changed then"):
            blockkv.open(paths, unlock=secret)
    with pytest.raises(WrongKey):
        blockkv.add_key_slot(paths, SECRET[::-1], unlock=SECRET)
    blockkv.add_key_slot(paths, OTHER, unlock=SECRET)
    with blockkv.open(paths, unlock=OTHER) as store:
        assert torch.equal(store.get("a"), pattern(1000))
    blockkv.remove_key_slot(paths, 0, unlock=OTHER)
    assert {row["path"] for row in blockkv.key_slots(paths)} == set(map(str, paths))
    blockkv.open(paths, unlock=OTHER).close()
    with pytest.raises(WrongKey):
        blockkv.open(paths, unlock=SECRET)


def slots_of(device: SimulatedDevice, size_bytes: int = SIZE_BYTES) -> list[bytes]:
    return [device.peek(offset, 4096) for offset in slot_offsets(size_bytes)]


def change_header(device: SimulatedDevice, name: str, value: object) -> None:
    """Every superblock, with checksums that are right again."""
    for offset in slot_offsets(SIZE_BYTES):
        raw = device.peek(offset, 4096)
        if not any(raw):
            continue
        start = SUPERBLOCK.offsets[name]
        field = next(field for field in SUPERBLOCK.fields if field.name == name)
        old = field.size_bytes
        packed = value if isinstance(value, bytes) else int(value).to_bytes(old, "little")  # type: ignore[call-overload]
        content = raw[16:start] + packed.ljust(old, b"\0") + raw[start + old :]
        device.poke(offset, xxhash.xxh3_128_digest(content) + content)


@pytest.mark.parametrize(
    ("name", "value"),
    [("label", b"mine"), ("log_sequence", 3), ("header_mac", bytes(32)), ("clean", 0), ("holder_pid", 1)],
)
def test_a_forged_header(device: SimulatedDevice, name: str, value: object) -> None:
    device = with_a_chunk(device, 5000)
    change_header(device, name, value)
    with pytest.raises(FormatError, match="was changed by somebody without its key"):
        opened(device)
    with pytest.raises(FormatError, match="was changed by somebody without its key"):
        blockkv.add_key_slot(device, OTHER, unlock=SECRET)


def test_a_slot_of_another_store_or_with_cheaper_parameters() -> None:
    uuid = bytes(16)
    key = VolumeKey.new(uuid)
    secret = Secret(SECRET)
    slot = wrap(key, secret)
    opened_by = VolumeKey.unwrap(uuid, [None, slot], secret)
    assert opened_by == (key, 1)
    assert VolumeKey.unwrap(b"\1" * 16, [slot], secret) is None
    assert VolumeKey.unwrap(uuid, [dataclasses.replace(slot, salt=bytes(32))], secret) is None
    stretched = wrap(key, blockkv.Passphrase("sesame"))
    cheaper = dataclasses.replace(stretched, passes=1)
    assert VolumeKey.unwrap(uuid, [cheaper], blockkv.Passphrase("sesame")) is None
    assert VolumeKey.unwrap(uuid, [stretched], blockkv.Passphrase("sesame")) == (key, 0)
    assert key.cipher_key != key.mac_key
    assert VolumeKey(b"\1" * 16, key.key).cipher_key != key.cipher_key


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 3},
        {"kind": 0},
        {"memory_kib": 8},
        {"passes": 2000},
        {"lanes": 65},
        {"memory_kib": (4 << 20) + 1},
        {"reserved": 1},
    ],
)
def test_impossible_slots(change: dict[str, int]) -> None:
    slot = wrap(VolumeKey.new(bytes(16)), blockkv.Passphrase("sesame"))
    raw = bytearray(slot.encode())
    for name, value in change.items():
        at = key_slots.KEY_SLOT.offsets[name]
        raw[at : at + 4] = value.to_bytes(4, "little")
    with pytest.raises(FormatError, match="key slot 2"):
        key_slots.decode(bytes(2 * 120) + bytes(raw) + bytes(5 * 120))


def test_changed_ciphertext_is_a_miss(device: SimulatedDevice) -> None:
    device = with_a_chunk(device, 200_000)
    shape = superblock.choose(slots_of(device)).geometry
    for unit in device.written_units():
        if unit * 4096 >= shape.data.offset_bytes and unit * 4096 < shape.data.end_bytes:
            device.flip_bit(unit * 4096 + 17, 3)
            break
    with opened(device) as store:
        assert store.get("a") is None
        assert store.stats()["get_checksum_mismatch"] == 1


# -- ephemeral -------------------------------------------------------------------------------------------


def test_an_ephemeral_store_forgets(loop_device: Callable[..., Path]) -> None:
    path = loop_device(32 << 20)
    blockkv.format(path, encrypt="ephemeral", label="scratch", average_chunk="64KiB")
    identity = None
    for _ in range(3):
        with blockkv.open(path) as store:
            assert len(store) == 0
            store.put(KEY, pattern(3_000_000), durable=True)
            assert torch.equal(store.get(KEY), pattern(3_000_000))
            info = store.info()
            assert identity in (None, (info["uuid"], info["label"], info["data_bytes"]))
            identity = info["uuid"], info["label"], info["data_bytes"]
            assert info["encryption"]["ephemeral"]
        assert_no_plaintext(path.read_bytes())
    with pytest.raises(WrongKey, match="its chunks are gone with it"):
        blockkv.open(path, read_only=True)
    with pytest.raises(WrongKey, match="its chunks are gone with it"):
        blockkv.add_key_slot(path, SECRET)
    assert blockkv.key_slots(path) == []


def test_an_ephemeral_store_counts_its_epochs() -> None:
    """What a client of `blockkv serve` leased in one of them is void in the next."""
    device = blank()
    blockkv.format(device, encrypt="ephemeral")
    epochs = []
    for _ in range(3):
        with at(device, None) as store:
            epochs.append(store.info()["epoch"])
        device = device.clone()
    assert epochs == sorted(set(epochs))


def test_nothing_unlocks_an_ephemeral_store() -> None:
    """Not even a forged flag in the header of another store makes an open empty it."""
    device = blank()
    blockkv.format(device, encrypt="ephemeral")
    before = slots_of(device)
    with pytest.raises(WrongKey, match="which nothing unlocks"):
        at(device, SECRET)
    assert slots_of(device) == before


def test_an_ephemeral_store_of_a_later_version_is_left_alone() -> None:
    device = blank()
    blockkv.format(device, encrypt="ephemeral")
    change_header(device, "ro_compat", 1 << 40)
    before = slots_of(device)
    with pytest.raises(blockkv.StoreReadOnly, match="the store is ephemeral"):
        at(device, None)
    assert slots_of(device) == before


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, SIZE_BYTES + 8192, SIZE_BYTES + (4 << 20)])
def test_an_ephemeral_store_begins_anew_or_is_as_it_was(size_bytes: int) -> None:
    """Cut short at every write and flush of an open, also on a device that has become larger."""
    small = blank()
    blockkv.format(small, encrypt="ephemeral", label="scratch")
    with at(small, None) as store:
        store.put(KEY, pattern(300_000), durable=True)
    device = SimulatedDevice(size_bytes, strict=True)
    device.poke(0, small.clone().peek(0, SIZE_BYTES))
    states: list[SimulatedDevice] = []
    dice = random.Random(6)

    def look(kind: object) -> None:
        states.extend(device.crash_clone(dice, how) for how in Crash)

    device.before_operation = look
    at(device, None).close()
    device.before_operation = None
    assert len(states) > 40
    for state in states:
        with at(state, None) as store:
            assert len(store) == 0
            assert (store.info()["label"], store.info()["device_bytes"]) == ("scratch", size_bytes)
            store.put(KEY, pattern(100_000), durable=True)
            assert torch.equal(store.get(KEY), pattern(100_000))


# -- power, arrays ---------------------------------------------------------------------------------------


def test_power_cuts(device: SimulatedDevice) -> None:
    """What was durable is there after a power cut at any operation, and nothing is found damaged."""
    dice = random.Random(11)
    states: list[tuple[SimulatedDevice, dict[str, int]]] = []
    durable: dict[str, int] = {}

    def look(kind: object) -> None:
        if dice.random() < 0.5:
            crash = dice.choice([Crash.POWER_CUT, Crash.PROCESS_KILL])
            states.append((device.crash_clone(dice, crash), dict(durable)))

    device.before_operation = look
    with at(device) as store:
        for number in range(25):
            key, size = f"key-{number}", dice.choice([10, 4096, 60_000, 300_000])
            store.put(key, pattern(size), durable=True)
            durable[key] = size
            if number % 7 == 3:
                store.checkpoint()
    device.before_operation = None
    assert len(states) > 50
    for state, there in states:
        with at(state) as store:
            assert {finding.structure for finding in store.findings} <= {"chunk"}, store.findings
            for key, size in there.items():
                assert torch.equal(store.get(key), pattern(size))


@pytest.mark.parametrize("encrypt", [SECRET, "ephemeral"])
def test_arrays(loop_device: Callable[..., Path], encrypt: bytes | str) -> None:
    paths = [loop_device(32 << 20) for _ in range(3)]
    blockkv.format(paths, encrypt=encrypt, average_chunk="64KiB")
    unlock = None if encrypt == "ephemeral" else encrypt
    keys = [f"{KEY}/{number}" for number in range(40)]
    with blockkv.open(paths, unlock=unlock) as store:
        store.put_many([(key, pattern(100_000)) for key in keys], durable=True)
        assert all(one is not None for one in store.get_many(keys))
    for path in paths:
        assert_no_plaintext(path.read_bytes())
    if unlock:
        with pytest.raises(WrongKey):
            blockkv.open(paths, unlock=OTHER)
        with blockkv.open(paths[1:], unlock=unlock, degraded=True) as store:
            assert 0 < len(store) < 40
            store.put("later", pattern(100), durable=True)
    with blockkv.open(paths, unlock=unlock) as store:
        assert 0 < len(store) < 40 if unlock else len(store) == 0
        store.put("again", pattern(100), durable=True)
        assert torch.equal(store.get("again"), pattern(100))


# -- growing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("average_chunk", "larger_bytes"), [("1MiB", 64 << 20), ("4KiB", 128 << 20)])
def test_growing(average_chunk: str, larger_bytes: int) -> None:
    """With the old checkpoint areas, and with new ones behind the old end; cut short at any operation."""
    device = blank()
    blockkv.format(device, average_chunk=average_chunk, encrypt=SECRET)
    device = with_a_chunk(device, 300_000)
    encryption = superblock.choose(slots_of(device)).encryption
    assert encryption is not None
    assert encryption.slots[0] is not None
    wrapped = encryption.slots[0].wrapped
    larger = SimulatedDevice(larger_bytes, strict=True)
    larger.poke(0, device.peek(0, SIZE_BYTES))
    states: list[SimulatedDevice] = []
    dice = random.Random(5)
    larger.before_operation = lambda kind: states.append(larger.crash_clone(dice, Crash.POWER_CUT))
    with pytest.raises(WrongKey):
        blockkv.grow(larger, unlock=OTHER)
    assert blockkv.grow(larger, unlock=SECRET)["grown"]
    larger.before_operation = None
    assert_no_plaintext(larger.peek(0, larger_bytes))
    for state in [*states, larger.clone()]:
        blockkv.grow(state.clone(), unlock=SECRET)  # whatever is left of the first time
        with at(state) as store:
            assert {finding.structure for finding in store.findings} <= {"superblock slot"}
            assert torch.equal(store.get("a"), pattern(300_000))
            has_grown = store.info()["device_bytes"] == larger_bytes
        with blockkv.open(state.clone(), read_only=True, unlock=SECRET) as store:
            assert not store.findings
        # what the volume key is wrapped in is not left behind where the device ended
        tail = slot_offsets(SIZE_BYTES)[SLOTS_PER_COPY:]
        assert has_grown != any(wrapped in state.peek(offset, 4096) for offset in tail)
        # nor in the tail that was prepared for the larger device
        places = {unit * 4096 for unit in state.written_units() if wrapped in state.peek(unit * 4096, 4096)}
        assert places <= set(slot_offsets(larger_bytes if has_grown else SIZE_BYTES))
    with opened(larger.clone(), evict=False) as store:
        assert store.info()["data_bytes"] > 40 << 20
        for number in range(40):
            store.put(f"{KEY}/{number}", pattern(1 << 20), durable=True)
        assert all(torch.equal(store.get(f"{KEY}/{number}"), pattern(1 << 20)) for number in range(40))
        assert not store.check(payload=True).findings


def test_growing_again_what_was_cut_short() -> None:
    """The device has become larger once more: the tail before last is not forgotten."""
    device = blank()
    blockkv.format(device, encrypt=SECRET)
    encryption = superblock.choose(slots_of(device)).encryption
    assert encryption is not None
    assert encryption.slots[0] is not None
    wrapped = encryption.slots[0].wrapped
    larger = SimulatedDevice(2 * SIZE_BYTES, strict=True)
    larger.poke(0, device.peek(0, SIZE_BYTES))
    states: list[SimulatedDevice] = []
    dice = random.Random(6)
    larger.before_operation = lambda kind: states.append(larger.crash_clone(dice, Crash.POWER_CUT))
    assert blockkv.grow(larger, unlock=SECRET)["grown"]
    for state in states:
        if superblock.choose(slots_of(state, 2 * SIZE_BYTES)).geometry.device_bytes == SIZE_BYTES:
            continue
        larger_still = SimulatedDevice(3 * SIZE_BYTES, strict=True)
        larger_still.poke(0, state.peek(0, 2 * SIZE_BYTES))
        assert blockkv.grow(larger_still, unlock=SECRET)["grown"]
        places = {at for at in larger_still.written_units() if wrapped in larger_still.peek(at * 4096, 4096)}
        assert {at * 4096 for at in places} <= set(slot_offsets(3 * SIZE_BYTES))


def test_an_ephemeral_store_grows_by_itself() -> None:
    device = blank()
    blockkv.format(device, encrypt="ephemeral")
    larger = SimulatedDevice(2 * SIZE_BYTES)
    larger.poke(0, device.peek(0, SIZE_BYTES))
    with pytest.raises(InvalidArgument, match="it takes all of its device"):
        blockkv.grow(larger)
    with at(larger, None) as store:
        assert store.info()["device_bytes"] == 2 * SIZE_BYTES


# -- wiping ----------------------------------------------------------------------------------------------


def test_a_destroyed_key(image_dir: Path) -> None:
    """The ciphertext is all there, and so is the key file; what is gone is what the key file had wrapped."""
    path = image_dir / "kv.img"
    uuid = blockkv.format(path, size=SIZE_BYTES, encrypt=SECRET)["uuid"]
    with blockkv.open(path, unlock=SECRET) as store:
        store.put(KEY, pattern(3_000_000), durable=True)
    before = path.read_bytes()
    report = blockkv.wipe(path, uuid)
    assert (report.method, report.store) == ("key", uuid)
    assert "the key is destroyed" in report.what
    with pytest.raises(NotFormatted):
        blockkv.open(path, unlock=SECRET)
    # Everything but the superblocks from before, under the header of a new store with the same key file.
    blockkv.format(path, encrypt=SECRET)
    fresh = path.read_bytes()
    tail = slot_offsets(SIZE_BYTES)[SLOTS_PER_COPY]
    path.write_bytes(fresh[:MEBIBYTE] + before[MEBIBYTE:tail] + fresh[tail:])
    with blockkv.open(path, unlock=SECRET) as store:
        assert len(store) == 0
        plain = cipher_of(store._state.device.cipher_key, store._state.geometry)
    assert_no_plaintext(plain.decrypt(0, path.read_bytes()))
    # And to show that this would have found it: the same with the old header.
    path.write_bytes(before)
    with blockkv.open(path, unlock=SECRET) as store:
        assert torch.equal(store.get(KEY), pattern(3_000_000))
        plain = cipher_of(store._state.device.cipher_key, store._state.geometry)
    assert PATTERN in plain.decrypt(0, path.read_bytes())


def test_overwriting(loop_device: Callable[..., Path]) -> None:
    path = loop_device(32 << 20)
    uuid = blockkv.format(path, label="old")["uuid"]
    with blockkv.open(path) as store:
        store.put(KEY, pattern(3_000_000), durable=True)
    told: list[tuple[int, int]] = []
    report = blockkv.wipe(path, uuid, progress=lambda done, total: told.append((done, total)))
    assert report.method == "overwrite"
    assert told[-1] == (32 << 20, 32 << 20)
    assert not any(path.read_bytes())


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("method", [None, "overwrite"])
@pytest.mark.parametrize(
    "left_bytes",
    [
        900 << 10,
        (3 << 19) + 512,
        3 << 20,
        SIZE_BYTES // 2 + 1,
        SIZE_BYTES - MEBIBYTE,
        SIZE_BYTES - MEBIBYTE + (256 << 10) + 700,
        SIZE_BYTES - PAGE_BYTES,
    ],
)
def test_wiping_what_is_left_of_a_store(
    image_dir: Path, left_bytes: int, method: Method | None, encrypted: bool
) -> None:
    """On a device that shrank, and in a copy that was cut short, also within a superblock."""
    path = image_dir / "kv.img"
    uuid = blockkv.format(path, size=SIZE_BYTES, encrypt=SECRET if encrypted else None)["uuid"]
    with blockkv.open(path, unlock=SECRET if encrypted else None) as store:
        store.put(KEY, pattern(3_000_000), durable=True)
    whole = path.read_bytes()
    slots = [slice(offset, offset + PAGE_BYTES) for offset in slot_offsets(SIZE_BYTES)]
    left = bytearray(whole[:MEBIBYTE] + bytes([1]) * (SIZE_BYTES - MEBIBYTE))
    for slot in slots:
        left[slot] = whole[slot]
    path.write_bytes(left[:left_bytes])
    with pytest.raises(blockkv.WrongStore):
        blockkv.wipe(path, "5e9c6b2c-0000-0000-0000-000000000000")
    report = blockkv.wipe(path, uuid, method)
    assert report.method == ("key" if encrypted and method is None else "overwrite")
    assert f"the device ends at {left_bytes}" in report.what
    after = path.read_bytes()
    assert len(after) == left_bytes
    if report.method == "overwrite":
        assert not any(after)
        assert report.overwritten_bytes == left_bytes
    else:
        assert not any(after[:MEBIBYTE])
        assert not any(after[max(MEBIBYTE, left_bytes - MEBIBYTE) :])
    with pytest.raises(NotFormatted):
        blockkv.wipe(path, uuid)


def test_wiping_is_for_the_store_that_was_named(loop_device: Callable[..., Path]) -> None:
    path = loop_device(32 << 20)
    with pytest.raises(NotFormatted):
        blockkv.wipe(path, "5e9c6b2c-0000-0000-0000-000000000000")
    uuid = blockkv.format(path)["uuid"]
    before = path.read_bytes()
    with pytest.raises(blockkv.WrongStore, match="was to be wiped"):
        blockkv.wipe(path, "5e9c6b2c-0000-0000-0000-000000000000")
    with pytest.raises(InvalidArgument, match="there is no key to destroy"):
        blockkv.wipe(path, uuid, method="key")
    with pytest.raises(InvalidArgument, match="cannot be erased by Format NVM"):
        blockkv.wipe(path, uuid, method="format")
    with pytest.raises(InvalidArgument, match="method is 'fire'"):
        blockkv.wipe(path, uuid, method="fire")  # type: ignore[arg-type]
    with blockkv.open(path), pytest.raises(blockkv.DeviceBusy):
        blockkv.wipe(path, uuid)
    assert path.read_bytes()[MEBIBYTE:-MEBIBYTE] == before[MEBIBYTE:-MEBIBYTE]


@pytest.mark.parametrize("writes", [0, 2, 5, 8, 11])
def test_wiping_that_was_cut_short_can_be_done_again(
    image_dir: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    path = image_dir / "kv.img"
    uuid = blockkv.format(path, size=SIZE_BYTES)["uuid"]
    with blockkv.open(path) as store:
        store.put(KEY, pattern(3_000_000), durable=True)
    fail_after(writes, monkeypatch)
    with pytest.raises(blockkv.DeviceError, match="the power failed"):
        blockkv.wipe(path, uuid)
    monkeypatch.undo()
    blockkv.wipe(path, uuid)
    assert not any(path.read_bytes())
