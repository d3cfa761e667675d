"""Clients that send nonsense, lie, or take what is not theirs: their connection ends, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_tools import Serves, wait_until

import blockkv
from blockkv.catalog.layouts import Layout, TensorSpec
from blockkv.format.record import key_digest
from blockkv.serving import protocol
from blockkv.serving.owner import Owner
from blockkv.serving.protocol import HEADER, MESSAGES, Message, encode, field_kinds
from blockkv.serving.wire import Frames

LAYOUT = Layout("tensor", (TensorSpec("", "uint8", (5000,)),))
BEGIN = protocol.BeginPuts([b"key"], b"\1", array("Q", [5000]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0)


class Raw:
    """A connection without a client behind it."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(path)
        self._frames = Frames(self.socket)
        self._descriptors: list[int] = []

    def greet(self, version: int = protocol.VERSION) -> Message:
        self.socket.sendall(encode(protocol.Hello(version, "hostile"), 1))
        first, self._descriptors, _, _ = socket.recv_fds(self.socket, 65536, 2)
        self._frames.add(first)
        return self.answer()

    def answer(self) -> Message:
        while (frame := self._frames.next()) is None:
            if not self._frames.fill():
                raise EOFError
        return frame.message

    def ask(self, message: Message) -> Message:
        self.socket.sendall(encode(message, 2))
        return self.answer()

    def is_closed(self) -> bool:
        """Whether the owner hangs up."""
        try:
            while self.socket.recv(65536):
                pass
        except (ConnectionError, EOFError):
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


@pytest.fixture
def owner(serve: Serves) -> Owner:
    return serve()


@pytest.fixture
def bystander(owner: Owner, caplog: pytest.LogCaptureFixture) -> Iterator[blockkv.Store]:
    """An honest client: it must not notice, and nothing may be left of the others afterwards."""
    with blockkv.open(owner.path) as store:
        store.put("kept", torch.arange(1000), durable=True)
        yield store
        assert torch.equal(store.get("kept"), torch.arange(1000))
        wait_until(lambda: store.stats()["clients"] == 1, "the others are seen to be gone")
        wait_until(lambda: not store.stats()["clients_letting_go"], "and have let go")
        figures = store.stats()
        assert (figures["client_leases"], figures["client_puts"]) == (0, 0)
        assert owner.store.check().ok
        assert not owner.store._state.claims
        assert store.put("afterwards", b"x", durable=True)
    failures = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not failures, "what was not foreseen"


@pytest.fixture
def raw(owner: Owner, bystander: blockkv.Store) -> Iterator[Callable[[], Raw]]:
    made: list[Raw] = []

    def make() -> Raw:
        made.append(Raw(owner.path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_another_version_is_told(raw: Callable[[], Raw]) -> None:
    answer = raw().greet(version=99)
    assert isinstance(answer, protocol.Failure)
    assert answer.error == "VersionTooNew"
    assert "version 99" in answer.what


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(100),
        HEADER.pack(2**32 - 1, 1, 0, 1, 0),
        HEADER.pack(4, 1, 7, 1, 0) + bytes(4),
        encode(protocol.Stats(), 1),
        encode(protocol.Welcome(1, 1, b"", 0, "", "", 0, b""), 1),
    ],
)
def test_no_greeting(raw: Callable[[], Raw], sent: bytes) -> None:
    one = raw()
    one.socket.sendall(sent)
    assert one.is_closed()


@pytest.mark.parametrize(
    "message",
    [
        protocol.Release(array("I", [1])),
        protocol.Release(array("I", [2**32 - 1])),
        protocol.Doubt(array("I", [1])),
        protocol.EndPuts(array("Q", [1]), array("i", [0]), [bytes(8)]),
        protocol.EndPuts(array("Q", [1, 1]), array("i", [0]), [bytes(8)]),
        protocol.GiveUp(array("Q", [77])),
        protocol.Allocate(77, 0),
        protocol.BeginPuts([b""], b"\1", array("Q", [10]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0),
        protocol.BeginPuts([b"k" * 5000], b"\1", array("Q", [9]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [0]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [2**63]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [10]), [LAYOUT.body], array("I", [3]), 0.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [10]), [b"Jnonsense"], array("I", [0]), 0.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1\1", array("Q", [10]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [1]), [LAYOUT.body], array("I", [0]), -1.0, 0, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [1]), [LAYOUT.body], array("I", [0]), 0.0, 2**40, 0),
        protocol.BeginPuts([b"k"], b"\1", array("Q", [4999]), [LAYOUT.body], array("I", [0]), 0.0, 0, 0),
        protocol.Delete([]),
        protocol.Mark([bytes(32)] * 2, 0),
        protocol.Answer(3),
        protocol.Hello(1, "again"),
    ],
)
def test_what_a_client_may_not_say(raw: Callable[[], Raw], message: Message) -> None:
    one = raw()
    assert isinstance(one.greet(), protocol.Welcome)
    one.socket.sendall(encode(message, 2))
    assert one.is_closed()


def test_what_others_have_is_not_theirs(raw: Callable[[], Raw], bystander: blockkv.Store) -> None:
    """Leases and tickets are per connection: another one's numbers are worth nothing."""
    one, two = raw(), raw()
    one.greet()
    two.greet()
    leased = one.ask(protocol.Acquire([key_digest(b"kept")]))
    assert isinstance(leased, protocol.Acquired)
    assert len(leased.places) == 1
    begun = one.ask(BEGIN)
    assert isinstance(begun, protocol.Begun)
    two.socket.sendall(encode(protocol.Release(leased.places)))
    assert two.is_closed()
    assert bystander.stats()["client_leases"] == 1
    three = raw()
    three.greet()
    three.socket.sendall(encode(protocol.GiveUp(begun.tickets)))
    assert three.is_closed()
    one.socket.sendall(encode(protocol.Release(array("I", [*leased.places, *leased.places]))))
    assert one.is_closed()
    assert bystander.stats()["client_puts"] == 1  # the connection is closed, its descriptors are not
    one.close()


def test_space_is_kept_as_long_as_a_descriptor_is(raw: Callable[[], Raw], bystander: blockkv.Store) -> None:
    """A client whose connection is closed may still have requests: its lifeline decides, wherever it is."""
    one = raw()
    one.greet()
    free_bytes = bystander.stats()["free_bytes"]
    begun = one.ask(BEGIN)
    assert isinstance(begun, protocol.Begun)
    copy = os.dup(one._descriptors[1])
    one.close()
    wait_until(lambda: bystander.stats()["clients_letting_go"] == 1, "the connection is seen to be over")
    time.sleep(0.2)
    figures = bystander.stats()
    assert figures["client_puts"] == 1
    assert figures["free_bytes"] == free_bytes - 8192
    # The key is free at once, its space is not.
    assert bystander.put("key", b"x")
    os.close(copy)
    wait_until(lambda: not bystander.stats()["clients_letting_go"], "it has let go")
    assert bystander.stats()["free_bytes"] == free_bytes - 4096


def test_checksums_that_are_not_true_are_a_miss(raw: Callable[[], Raw], bystander: blockkv.Store) -> None:
    one = raw()
    one.greet()
    begun = one.ask(BEGIN)
    assert isinstance(begun, protocol.Begun)
    ended = one.ask(protocol.EndPuts(begun.tickets, array("i", [0]), [bytes(8)]))
    assert isinstance(ended, protocol.Ended)
    assert ended.inserted == b"\1"
    assert bystander.get("key") is None
    wait_until(lambda: not bystander.contains("key"), "the owner has looked for itself")
    one.close()


def test_a_client_cannot_have_all_the_space(raw: Callable[[], Raw], bystander: blockkv.Store) -> None:
    one = raw()
    one.greet()
    layout = Layout("tensor", (TensorSpec("", "uint8", (1 << 20,)),))
    keys = [str(number).encode() for number in range(100)]
    ask = protocol.BeginPuts(
        keys, bytes(100), array("Q", [1 << 20] * 100), [layout.body], array("I", bytes(400)), 0.0, 0, 0
    )
    begun = one.ask(ask)
    assert isinstance(begun, protocol.Begun)
    granted = begun.outcomes.count(protocol.Outcome.GRANTED)
    assert 5 < granted < 20
    waiting = begun.tickets[granted]
    assert one.ask(protocol.Allocate(waiting, 0)) == protocol.Granted(array("Q"))
    one.socket.sendall(encode(protocol.GiveUp(array("Q", [waiting])), 3))
    assert one.ask(protocol.Allocate(waiting, 1)) == protocol.Granted(array("Q")), "given up meanwhile"
    assert bystander.put("another", bytearray(20 << 20))
    one.close()


def test_a_client_that_takes_no_answers(raw: Callable[[], Raw], bystander: blockkv.Store) -> None:
    """It asks and asks and reads nothing: others do not wait for it."""
    one = raw()
    one.greet()
    asked = threading.Thread(target=_ask_for_ever, args=(one.socket,), daemon=True)
    asked.start()
    time.sleep(0.5)
    begin_s = time.monotonic()
    for _ in range(50):
        assert bystander.lookup(["kept"]) == 1
    assert time.monotonic() - begin_s < 15
    one.socket.shutdown(socket.SHUT_RDWR)
    one.close()
    asked.join(10)


def _ask_for_ever(connection: socket.socket) -> None:
    frame = encode(protocol.Lookup([bytes(32)] * 100, 0), 2)
    try:
        while True:
            connection.sendall(frame)
    except OSError:
        return


def test_random_messages(owner: Owner, raw: Callable[[], Raw]) -> None:
    """Right in form, wrong in content; and frames with bytes that were changed."""
    rng = random.Random(11)
    for _ in range(400):
        one = raw()
        one.greet()
        sent = b"".join(_random_frame(rng) for _ in range(rng.randrange(1, 8)))
        if rng.random() < 0.5:
            changed = bytearray(sent)
            for _ in range(rng.randrange(1, 10)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            sent = bytes(changed)
        with contextlib.suppress(OSError):
            one.socket.sendall(sent)
        one.close()


def _random_frame(rng: random.Random) -> bytes:
    numbers = (0, 1, 2, 3, 255)
    made: dict[str, Callable[[], Any]] = {
        "B": lambda: rng.choice(numbers),
        "I": lambda: rng.choice((*numbers, 2**32 - 1)),
        "Q": lambda: rng.choice((*numbers, 2**64 - 1)),
        "i": lambda: rng.choice((0, 1, -1, -5, -(2**31))),
        "q": lambda: rng.choice((0, 1, -1, 2**62)),
        "d": lambda: rng.choice((0.0, 1.0, -1.0, float("inf"), float("nan"), 1e300)),
        "raw": lambda: rng.randbytes(rng.choice((0, 1, 2, 40))),
        "text": lambda: rng.choice(("", "x", "\u20ac" * 30)),
        "U32s": lambda: array("I", [rng.choice(numbers) for _ in range(rng.randrange(3))]),
        "U64s": lambda: array("Q", [rng.choice((1, 2, 4096)) for _ in range(rng.randrange(3))]),
        "I32s": lambda: array("i", [rng.choice((0, -5, 1)) for _ in range(rng.randrange(3))]),
        "raws": lambda: [rng.choice((b"", b"a", LAYOUT.body)) for _ in range(rng.randrange(3))],
        "digests": lambda: [key_digest(rng.choice((b"kept", b"a"))) for _ in range(rng.randrange(3))],
    }
    cls = rng.choice([kind for kind in MESSAGES.values() if kind is not protocol.Delete])
    return encode(cls(*[made[kind]() for _, kind in field_kinds(cls)]), rng.randrange(3))


def test_an_owner_that_sends_nonsense(tmp_path: Any) -> None:
    """A client says what is wrong, and keeps nothing open."""
    path = str(tmp_path / "false.sock")
    answers = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode(protocol.Answer(1), 1),
        encode(protocol.Welcome(protocol.VERSION, 1, bytes(4096), 0, "", "{}", 0, b""), 1),
        encode(protocol.Welcome(protocol.VERSION + 1, 1, bytes(4096), 0, "", "{}", 0, b""), 1),
        struct.pack("<I", 5),
        b"",
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def run() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    socket.send_fds(connection, [answer or b"\0"], [0, 0] if b"{}" in answer else [])

        thread = threading.Thread(target=run)
        thread.start()
        before = len(list(Path("/proc/self/fd").iterdir()))
        raised = []
        for _ in answers:
            with pytest.raises(blockkv.BlockKVError) as caught:
                blockkv.open(path)
            raised.append(caught.type)
        assert raised.count(blockkv.VersionTooNew) == 1
        thread.join()
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
