"""Spans of OpenTelemetry round puts, gets and streams, for stores that are told to.

A store that is traced is of another class, made here, whose methods have a span round them; every other store
is as it would be without this module. The spans follow OpenTelemetry's semantic conventions for database
clients: names `put PATH`, `BATCH get PATH`, `stream PATH`; kind CLIENT. Needs `pip install 'blockkv[otel]'`.

Attributes:
    db.system.name             "blockkv"
    db.namespace               path of the device, or of the owner's socket
    db.operation.name          put, get, stream; "BATCH put", "BATCH get" of several chunks
    db.operation.batch.size    how many, where there are several
    error.type                 class of the exception that ended it
    blockkv.chunks             how many chunks were asked for or given
    blockkv.hits               of a get or stream: how many of them were there, and right
    blockkv.stored             of a put: how many were written, and not there before
    blockkv.bytes              payload that was written, or read into memory of the caller
    blockkv.durable            of a put: whether it waited for that
    blockkv.preload            of a get or stream: whether it was served after those without
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from blockkv.errors import InvalidArgument
from blockkv.store.store import Store, listed, several_keys
from blockkv.store.streams import PartStream

logger = logging.getLogger("blockkv")

if TYPE_CHECKING:
    from concurrent.futures import Future

    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["VARIABLE", "traced", "tracing_wanted"]

VARIABLE = "BLOCKKV_TRACING"
"""Set to 1, every store that `blockkv.open` opens in this process is traced."""
SCHEMA = "https://opentelemetry.io/schemas/1.33.0"

S = TypeVar("S", bound=Any)


def traced(store: S, tracer_provider: TracerProvider | None = None) -> S:
    """The same store, whose puts, gets and streams have spans from now on; once is enough.

    `store` is any kind of them: of a device, an array, a client, a `TieredStore`. Without `tracer_provider`
    the process's is used. Raises InvalidArgument where opentelemetry-api is not installed.
    """
    trace = _trace_api()
    if not isinstance(store, _Traced):
        where = store._where if isinstance(store, Store) else store.store._where
        store._tracing = _Tracing(trace.get_tracer("blockkv", None, tracer_provider, SCHEMA), where)
        store.__class__ = _traced_class(store.__class__)
    return store


def tracing_wanted() -> Callable[[S], S]:
    """What to do with a store that is about to be opened: `traced`, or nothing, as BLOCKKV_TRACING says.

    Raises InvalidArgument as `traced` does.
    """
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return lambda store: store
    _trace_api()
    return traced


def _trace_api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        raise InvalidArgument(
            f"tracing (see {VARIABLE}) needs opentelemetry-api: pip install 'blockkv[otel]'"
        ) from None
    return trace


class _Tracing:
    """Makes the spans of one store."""

    def __init__(self, tracer: Tracer, where: str) -> None:
        self._tracer = tracer
        self._where = where

    def start(self, operation: str, chunks: int, **attributes: bool) -> Span:
        from opentelemetry.trace import SpanKind

        name = f"BATCH {operation}" if chunks > 1 and operation != "stream" else operation
        given: dict[str, Any] = {
            "db.system.name": "blockkv",
            "db.namespace": self._where,
            "db.operation.name": name,
            "blockkv.chunks": chunks,
        }
        if chunks > 1:
            given["db.operation.batch.size"] = chunks
        given |= {f"blockkv.{key}": value for key, value in attributes.items()}
        return self._tracer.start_span(f"{name} {self._where}", kind=SpanKind.CLIENT, attributes=given)

    @contextlib.contextmanager
    def span(self, operation: str, chunks: int, **attributes: bool) -> Iterator[Span]:
        """One that is current while it lasts: those of stores below are its children."""
        from opentelemetry.trace import use_span

        span = self.start(operation, chunks, **attributes)
        with use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as error:
                failed(span, error)
                raise
            finally:
                end(span)


def failed(span: Span, error: BaseException) -> None:
    """Say of a span how it ended."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(StatusCode.ERROR, str(error))


def end(span: Span) -> None:
    """End a span, whatever its processors make of that: what was stored is stored."""
    try:
        span.end()
    except Exception:
        logger.exception("a span processor failed")


def _bytes_of(tensors: Any) -> int:
    """Of a chunk as it is put or got."""
    if isinstance(tensors, Mapping):
        return sum(map(_bytes_of, tensors.values()))
    if isinstance(tensors, list | tuple):
        return sum(map(_bytes_of, tensors))
    size = getattr(tensors, "nbytes", None)
    return int(size) if size is not None else memoryview(tensors).nbytes


def _note_puts(span: Span, values: Sequence[Any], results: Sequence[Any]) -> None:
    written = [value for value, result in zip(values, results, strict=True) if result is True]
    span.set_attribute("blockkv.stored", len(written))
    span.set_attribute("blockkv.bytes", sum(map(_bytes_of, written)))


def _note_gets(span: Span, results: Sequence[Any], outs: Sequence[Any] | None) -> None:
    found = outs or results
    hits = [
        one for one, result in zip(found, results, strict=True) if result is not None and result is not False
    ]
    span.set_attribute("blockkv.hits", len(hits))
    span.set_attribute("blockkv.bytes", sum(map(_bytes_of, hits)))


class _Traced:
    """What `isinstance` knows a traced store by."""

    _tracing: _Tracing


@functools.cache
def _traced_class(of: type) -> type:
    """The class of a store, with spans round the methods that it has."""
    methods = {name: make(getattr(of, name)) for name, make in _MAKERS.items() if hasattr(of, name)}
    names = {"__module__": of.__module__, "__qualname__": of.__qualname__, "__doc__": of.__doc__}
    return type(of.__name__, (_Traced, of), methods | names)


def _put(inner: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(inner)
    def put(self: Any, key: Any, tensors: Any, durable: bool = False, **options: Any) -> bool:
        with self._tracing.span("put", 1, durable=durable) as span:
            result = inner(self, key, tensors, durable, **options)
            _note_puts(span, [tensors], [result])
            return result

    return put


def _put_many(inner: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
    @functools.wraps(inner)
    def put_many(self: Any, items: Any, durable: bool = False, **options: Any) -> list[bool]:
        pairs = listed(items.items() if isinstance(items, Mapping) else items, "(key, tensors) pairs")
        with self._tracing.span("put", len(pairs), durable=durable) as span:
            results = inner(self, pairs, durable, **options)
            _note_puts(span, [pair[1] for pair in pairs], results)
            return results

    return put_many


def _submit_put(inner: Callable[..., Future[bool]]) -> Callable[..., Future[bool]]:
    @functools.wraps(inner)
    def submit_put(self: Any, key: Any, tensors: Any, durable: bool = False, **options: Any) -> Any:
        span = self._tracing.start("put", 1, durable=durable)
        submit = functools.partial(inner, self, key, tensors, durable, **options)
        return _followed(span, submit, lambda result: _note_puts(span, [tensors], [result]))

    return submit_put


def _get(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def get(self: Any, key: Any, out: Any = None, **options: Any) -> Any:
        with self._tracing.span("get", 1, preload=options.get("preload", False)) as span:
            result = inner(self, key, out, **options)
            _note_gets(span, [result], None if out is None else [out])
            return result

    return get


def _get_many(inner: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(inner)
    def get_many(self: Any, keys: Any, outs: Any = None, **options: Any) -> list[Any]:
        wanted = several_keys(keys)
        outputs = None if outs is None else listed(outs, "outputs")
        with self._tracing.span("get", len(wanted), preload=options.get("preload", False)) as span:
            results = inner(self, wanted, outputs, **options)
            _note_gets(span, results, outputs)
            return results

    return get_many


def _submit_get(inner: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @functools.wraps(inner)
    def submit_get(self: Any, key: Any, out: Any = None, **options: Any) -> Any:
        span = self._tracing.start("get", 1, preload=options.get("preload", False))
        submit = functools.partial(inner, self, key, out, **options)
        outs = None if out is None else [out]
        return _followed(span, submit, lambda result: _note_gets(span, [result], outs))

    return submit_get


def _followed(span: Span, submit: Callable[[], Future[Any]], note: Callable[[Any], None]) -> Future[Any]:
    """The future of a call, whose span ends with it."""

    def done(ended: Future[Any]) -> None:
        if ended.cancelled():
            span.set_attribute("error.type", "CancelledError")
        elif (error := ended.exception()) is not None:
            failed(span, error)
        else:
            note(ended.result())
        end(span)

    try:
        future = submit()
    except BaseException as error:
        failed(span, error)
        end(span)
        raise
    future.add_done_callback(done)
    return future


class _TracedStream(PartStream):
    _span: Span
    _bytes = 0

    def _handed_over(self, group: Any) -> tuple[Any, list[Any]]:
        number, tensors = super()._handed_over(group)
        self._bytes += _bytes_of(tensors)
        return number, tensors

    def close(self) -> None:
        super().close()
        if self._span.is_recording():
            self._span.set_attribute("blockkv.hits", self.valid_keys)
            self._span.set_attribute("blockkv.bytes", self._bytes)
            if self.problem is not None:
                failed(self._span, self.problem)
            end(self._span)


def _stream(inner: Callable[..., PartStream]) -> Callable[..., PartStream]:
    @functools.wraps(inner)
    def stream(self: Any, keys: Any, *arguments: Any, **options: Any) -> PartStream:
        wanted = several_keys(keys)
        span = self._tracing.start("stream", len(wanted), preload=options.get("preload", False))
        try:
            made = inner(self, wanted, *arguments, **options)
        except BaseException as error:
            failed(span, error)
            end(span)
            raise
        made.__class__ = _TracedStream
        assert isinstance(made, _TracedStream)
        made._span = span
        return made

    return stream


_MAKERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "put": _put,
    "put_many": _put_many,
    "submit_put": _submit_put,
    "get": _get,
    "get_many": _get_many,
    "submit_get": _submit_get,
    "stream": _stream,
}
