"""Spans, as the real SDK of OpenTelemetry gets them; and that nothing is there for who does not ask."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import blockkv
from blockkv.serving.owner import Owner
from blockkv.tracing import VARIABLE, traced

LAYOUT = blockkv.KVLayout.of("layers tokens dim", "float16", layers=2, tokens=8, dim=64)


class Spans:
    """What has been exported since one asked last."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def taken(self) -> list[ReadableSpan]:
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return found

    def one(self) -> dict[str, Any]:
        (span,) = self.taken()
        assert span.kind is SpanKind.CLIENT
        attributes = dict(span.attributes or {})
        assert attributes.pop("db.system.name") == "blockkv"
        assert span.name == f"{attributes['db.operation.name']} {attributes.pop('db.namespace')}"
        return attributes | {"ok": span.status.status_code is not StatusCode.ERROR}


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def store(image_dir: Path, spans: Spans) -> Iterator[blockkv.Store]:
    path = image_dir / "store.img"
    blockkv.format(path, size="64MiB")
    with traced(blockkv.open(path), spans.provider) as store:
        yield store


def test_puts_and_gets(store: blockkv.Store, spans: Spans) -> None:
    assert store.put("a", b"a" * 100, durable=True)
    assert spans.one() == {
        "db.operation.name": "put",
        "blockkv.chunks": 1,
        "blockkv.stored": 1,
        "blockkv.bytes": 100,
        "blockkv.durable": True,
        "ok": True,
    }
    tensor = torch.zeros(50, dtype=torch.float16)
    assert store.put_many(iter([("a", b"other"), ("b", [tensor, tensor]), ("c", {"k": tensor})])) == [
        *(False, True, True)
    ]
    assert spans.one() == {
        "db.operation.name": "BATCH put",
        "db.operation.batch.size": 3,
        "blockkv.chunks": 3,
        "blockkv.stored": 2,
        "blockkv.bytes": 300,
        "blockkv.durable": False,
        "ok": True,
    }
    assert len(store.get_many(key for key in ("a", "missing", "b"))) == 3
    assert spans.one() == {
        "db.operation.name": "BATCH get",
        "db.operation.batch.size": 3,
        "blockkv.chunks": 3,
        "blockkv.hits": 2,
        "blockkv.bytes": 300,
        "blockkv.preload": False,
        "ok": True,
    }
    out = bytearray(100)
    assert store.get("a", out, preload=True)
    found = spans.one()
    assert (found["blockkv.hits"], found["blockkv.bytes"], found["blockkv.preload"]) == (1, 100, True)
    assert store.get("missing") is None
    assert spans.one()["blockkv.hits"] == 0


def test_futures_end_their_spans(store: blockkv.Store, spans: Spans) -> None:
    assert store.submit_put("a", b"a" * 100).result()
    wait_for(spans, "put", **{"blockkv.stored": 1, "blockkv.bytes": 100})
    assert store.submit_get("a").result() is not None
    wait_for(spans, "get", **{"blockkv.hits": 1, "blockkv.bytes": 100})
    assert store.submit_get("missing").result() is None
    wait_for(spans, "get", **{"blockkv.hits": 0, "blockkv.bytes": 0})


def wait_for(spans: Spans, operation: str, **wanted: int) -> None:
    """A future's callbacks run after whoever waits for it was woken."""
    found: list[ReadableSpan] = []
    ended = threading.Event()
    while not (found := spans.taken()):
        ended.wait(0.001)
    (span,) = found
    attributes = span.attributes or {}
    assert attributes["db.operation.name"] == operation
    assert {name: attributes[name] for name in wanted} == wanted


def test_streams(store: blockkv.Store, spans: Spans) -> None:
    chunk = torch.randn(2, 8, 64).half()
    keys = ["0", "1", "2"]
    store.put_many([(key, chunk) for key in keys])
    spans.taken()
    with store.stream([*keys, "missing"], layout=LAYOUT) as stream:
        for number, tensors in stream:
            assert all(torch.equal(one, chunk[number : number + 1]) for one in tensors)
    found = spans.one()
    assert found["db.operation.name"] == "stream"
    assert (found["blockkv.chunks"], found["blockkv.hits"]) == (4, 3)
    assert found["blockkv.bytes"] == 3 * chunk.nbytes
    with store.stream(keys, layout=LAYOUT) as stream:
        next(stream)
    assert spans.one()["blockkv.bytes"] == 3 * chunk.nbytes // 2, "what was handed over, not all there is"
    with pytest.raises(blockkv.InvalidArgument):
        store.stream(keys, "sideways", layout=LAYOUT)
    assert spans.one()["error.type"] == "InvalidArgument"


def test_errors(store: blockkv.Store, spans: Spans) -> None:
    with pytest.raises(blockkv.InvalidArgument):
        store.put("", b"")
    found = spans.one()
    assert (found["ok"], found["error.type"]) == (False, "InvalidArgument")
    with pytest.raises(blockkv.BatchError):
        store.put_many([("good", b"good"), ("", b"bad")])
    found = spans.one()
    assert (found["ok"], found["error.type"], found["blockkv.chunks"]) == (False, "BatchError", 2)
    store.close()
    with pytest.raises(blockkv.StoreClosed):
        store.submit_get("key")
    assert spans.one()["error.type"] == "StoreClosed"


def test_a_processor_that_fails(store: blockkv.Store, spans: Spans) -> None:
    """What is stored is stored, and what is read is read."""

    class Failing(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError("nobody collects")

    spans.provider.add_span_processor(Failing())
    assert store.put("a", b"a" * 100, durable=True)
    assert store.submit_put("b", b"b" * 100).result()
    assert bytes(store.get("a").numpy()) == b"a" * 100
    assert bytes(store.submit_get("b").result().numpy()) == b"b" * 100
    with pytest.raises(blockkv.InvalidArgument):
        store.put("", b"no key")
    assert len(spans.taken()) == 5


def test_a_memory_tier_is_the_parent_of_its_store(image_dir: Path, spans: Spans) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="64MiB")
    store = traced(blockkv.open(path), spans.provider)
    with traced(blockkv.TieredStore(store, 64 << 20, interval_s=None), spans.provider) as tier:
        assert isinstance(tier, blockkv.TieredStore)
        tier.put("key", b"k" * 100, durable=True)
        inner, outer = spans.taken()
        assert inner.parent is not None
        assert outer.parent is None
        assert inner.parent.span_id == outer.context.span_id
        assert tier.get("key") is not None
        assert len(spans.taken()) == 1, "it was in memory: the store was not asked"


def test_of_arrays_and_clients(image_dir: Path, spans: Spans) -> None:
    members = [image_dir / "a.img", image_dir / "b.img"]
    blockkv.format(members, size="32MiB")
    with traced(blockkv.open(members), spans.provider) as array:
        array.put_many([("a", b"1"), ("b", b"2")])
        assert spans.one()["blockkv.stored"] == 2
    served, socket = image_dir / "served.img", image_dir / "kv.sock"
    blockkv.format(served, size="32MiB")
    owner = Owner(blockkv.open(served), socket)
    serving = threading.Thread(target=owner.serve)
    serving.start()
    with traced(blockkv.open(socket), spans.provider) as client:
        client.put("key", b"k" * 100)
        assert spans.one()["blockkv.bytes"] == 100
    owner.stop()
    serving.join()
    owner.close()


def test_it_stays_what_it_was(store: blockkv.Store, image_dir: Path, spans: Spans) -> None:
    assert isinstance(store, blockkv.Store)
    assert traced(store, spans.provider) is store
    store.put("once", b"1")
    assert len(spans.taken()) == 1, "traced twice is traced once"
    other = image_dir / "other.img"
    blockkv.format(other, size="16MiB")
    with blockkv.open(other) as plain:
        assert type(plain) is blockkv.Store
        assert type(plain).put is not type(store).put
        plain.put("key", b"k")
    assert spans.taken() == []


PROGRAM = """
import sys, blockkv
blockkv.format("s.img", size="16MiB")
with blockkv.open("s.img") as store:
    store.put("key", b"k")
    print(type(store) is blockkv.Store, "opentelemetry" in sys.modules)
"""


@pytest.mark.parametrize(
    ("value", "printed"), [(None, "True False"), ("", "True False"), ("0", "True False"), ("1", "False True")]
)
def test_the_environment_decides(value: str | None, printed: str, image_dir: Path) -> None:
    environment = {name: one for name, one in os.environ.items() if name != VARIABLE}
    if value is not None:
        environment[VARIABLE] = value
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=image_dir,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == printed, done.stderr


def test_without_opentelemetry(
    store: blockkv.Store, image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    other = image_dir / "other.img"
    blockkv.format(other, size="16MiB")
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(blockkv.InvalidArgument, match=r"blockkv\[otel\]"):
        blockkv.open(other)
    monkeypatch.delenv(VARIABLE)
    blockkv.open(other).close()
