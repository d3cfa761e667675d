"""Random batches for an engine, beside a copy in memory of what the device has to hold."""

from __future__ import annotations

import random

import xxhash
from engine_tools import MIB, Memory, run

from blockkv.device.base import TRANSFER_FIELDS, UNIT_BYTES, Batch, Direction, Priority
from blockkv.device.engine import NativeDevice

SIZE_BYTES = 16 * MIB
PAYLOADS = (1, 511, 512, 4095, 4096, 5000, 12288, 65536, 131072, 200001, 1 << 20)
LEAVES = (0, 1000, 4096, 131072, 1 << 30)


def cut(draw: random.Random, total: int, step: int, most: int) -> list[int]:
    """Random lengths, multiples of `step` but for the last, that add up to `total`."""
    lengths = []
    while total:
        whole = -(-total // step)
        length = total if len(lengths) == most - 1 else min(total, draw.randrange(1, whole + 1) * step)
        lengths.append(length)
        total -= length
    return lengths


class Workload:
    """Random batches on one device, beside a copy of its contents in memory."""

    def __init__(self, device: NativeDevice, seed: int, base: int = 0, size: int = SIZE_BYTES) -> None:
        self.device = device
        self.draw = random.Random(seed)
        self.base, self.size = base, size
        self.contents = bytearray(size)
        self.memory = Memory(8 * MIB)

    def step(self) -> None:
        write = self.draw.random() < 0.5
        noise = self.draw.randbytes(1 << 16)
        self.memory.fill(noise * (self.memory.size_bytes >> 16))
        batch = Batch(Direction.WRITE if write else Direction.READ, self.draw.choice(list(Priority)))
        batch.on_caller = self.draw.random() < 0.5
        offset, position, described = (
            self.draw.randrange(100) * UNIT_BYTES,
            self.draw.randrange(UNIT_BYTES),
            [],
        )
        for _ in range(self.draw.randrange(1, 7)):
            payload = self.draw.choice(PAYLOADS)
            units = -(-payload // UNIT_BYTES) * UNIT_BYTES
            extents, segments = [], []
            for length in cut(self.draw, units, UNIT_BYTES, 5):
                if self.draw.random() < 0.4:
                    offset += UNIT_BYTES * self.draw.randrange(3)
                extents.append((self.base + offset, length))
                offset += length
            for length in cut(self.draw, payload, self.draw.choice((1, 512, 4096)), 9):
                if self.draw.random() < 0.6:
                    position = -(-position // 4096) * 4096
                segments.append((self.memory.at(position), length))
                position += length + self.draw.randrange(40)
            batch.add(payload, extents, segments, self.draw.choice(LEAVES))
            described.append((payload, extents, segments))
        expected_memory = bytearray(self.memory.bytes[:])
        assert run(self.device, batch) == [0] * len(batch)
        for number, (payload, extents, segments) in enumerate(described):
            spans = [(address - self.memory.at(0), length) for address, length in segments]
            if write:
                data = b"".join(expected_memory[at : at + length] for at, length in spans)
                padded = data + bytes(-payload % UNIT_BYTES)
                for at, length in extents:
                    self.contents[at - self.base : at - self.base + length] = padded[:length]
                    padded = padded[length:]
            else:
                data = b"".join(
                    self.contents[at - self.base : at - self.base + length] for at, length in extents
                )[:payload]
                rest = data
                for at, length in spans:
                    expected_memory[at : at + length] = rest[:length]
                    rest = rest[length:]
            leaf_bytes = batch.transfers[number * TRANSFER_FIELDS + 4]
            if leaf_bytes:
                assert batch.leaves(number) == expected_leaves(data, leaf_bytes)
        # byte for byte: the payload in its segments, and everything around them as before
        assert self.memory.bytes[:] == expected_memory

    def compare(self) -> None:
        stored = self.device.read(self.base, self.size)
        assert stored == self.contents


def expected_leaves(data: bytes, leaf_bytes: int) -> bytes:
    return b"".join(
        xxhash.xxh3_64_intdigest(data[start : start + leaf_bytes]).to_bytes(8, "little")
        for start in range(0, len(data), leaf_bytes)
    )
