"""Commands on chunks: ls, put, get, rm."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

import blockkv
from blockkv.cli.app import (
    StorePath,
    command,
    degraded_option,
    key_argument,
    open_store,
    parse_key,
    store_argument,
)
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.output import Output, key_text, lines, private_file, standard_output
from blockkv.errors import InvalidArgument

if TYPE_CHECKING:
    from blockkv import ChunkInfo


@command("ls", examples=["ls /dev/nvme1n1 --prefix prompt- --limit 20", "ls /run/blockkv/kv0/kv.sock --json"])
@store_argument
@degraded_option
@click.option("--prefix", default="", help="Only keys that start with this text.")
@click.option("--limit", type=click.IntRange(min=1), help="Show at most this many.")
def ls(output: Output, store_path: StorePath, degraded: bool, prefix: str, limit: int | None) -> None:
    """List chunks: key, bytes, tensors, extents. Next to be evicted first; of an array, member by member."""
    with open_store(store_path, degraded=degraded, read_only=True) as store:
        keys = store.keys()
        chosen = (
            info
            for key in keys
            if key_text(key).startswith(prefix) and (info := store.entry(key)) is not None
        )
        chunks = [_describe(info) for info in itertools.islice(chosen, limit)]
    output.document(
        {"chunks": chunks}, lambda: _print_chunks(chunks, several=not isinstance(store_path, str))
    )


def _describe(info: ChunkInfo) -> dict[str, Any]:
    return {
        "key": key_text(info.key),
        "payload_bytes": info.payload_bytes,
        "form": info.layout.form,
        "tensors": [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in info.layout.specs
        ],
        "layout": str(info.layout),
        "extents": [{"start_unit": start, "unit_count": count} for start, count in info.extents],
        "durable": info.durable,
        "device": info.device,
    }


def _print_chunks(chunks: list[dict[str, Any]], *, several: bool) -> None:
    rows = [
        [
            chunk["key"],
            size_text(chunk["payload_bytes"]),
            chunk["layout"],
            " ".join(f"{extent['start_unit']}+{extent['unit_count']}" for extent in chunk["extents"]),
            *([chunk["device"]] if several else []),
        ]
        for chunk in chunks
    ]
    if rows:
        header = ["key", "bytes", "tensors", "extents", *(["device"] if several else [])]
        lines(rows, header=header, right=" r")


@command("put", examples=["put /dev/nvme1n1 my-key chunk.bin", "put /dev/nvme1n1 hex:00ff - < chunk.bin"])
@store_argument
@degraded_option
@key_argument
@click.argument("file", type=click.Path(allow_dash=True))
@click.option("--npy", is_flag=True, help="FILE is a NumPy array; keep its dtype and shape.")
def put(
    output: Output, store_path: StorePath, degraded: bool, key: str | bytes, file: str, npy: bool
) -> None:
    """Store the bytes of FILE (- for stdin) under KEY. It is on media when the command ends.

    Chunks never change: where the key is stored already, nothing is written and the command says so.
    """
    # Read before the store is opened: a slow producer on stdin must not hold its lock.
    with _source(file) as source:
        value = _array(source, file) if npy else _bytes_of(source, file)
    with open_store(store_path, degraded=degraded) as store:
        stored = store.put(key, memoryview(value) if isinstance(value, mmap.mmap) else value, durable=True)
        info = store.entry(key)
        assert info is not None, "a durable put returned, so the key is there"
        size_bytes = info.payload_bytes
    document = {"key": key_text(key), "stored": stored, "payload_bytes": size_bytes}
    what = "stored" if stored else "was there already, nothing written:"
    output.document(document, lambda: click.echo(f"{key_text(key)}: {what} {size_text(size_bytes)}"))


@contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
    else:
        with Path(file).open("rb") as opened:
            yield opened


def _bytes_of(source: BinaryIO, file: str) -> bytes | mmap.mmap:
    """All bytes of `source`: mapped where that is possible, so that a large file is not copied."""
    try:
        size_bytes = os.fstat(source.fileno()).st_size
        # A private mapping: writable, which torch asks of memory, and never written back.
        content: bytes | mmap.mmap = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        content = source.read()
        size_bytes = len(content)
    if size_bytes == 0:
        raise InvalidArgument(f"{file} is empty; there is nothing to store")
    return content


def _array(source: BinaryIO, file: str) -> Any:
    import io

    import numpy as np
    import torch

    try:
        return torch.from_numpy(np.load(io.BytesIO(source.read()), allow_pickle=False))
    except (EOFError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{file} is not a NumPy array that torch can hold: {error}") from error


@command("get", examples=["get /dev/nvme1n1 my-key chunk.bin", "get /dev/nvme1n1 my-key --npy > chunk.npy"])
@store_argument
@degraded_option
@key_argument
@click.argument("file", type=click.Path(allow_dash=True), default="-")
@click.option("--npy", is_flag=True, help="Write a NumPy array instead of raw bytes.")
def get(
    output: Output, store_path: StorePath, degraded: bool, key: str | bytes, file: str, npy: bool
) -> int | None:
    """Write the chunk under KEY to FILE (default: stdout): its tensors' bytes, one after the other.

    The content is verified before the first byte is written. A missing key exits 1.
    """
    if file == "-" and output.as_json:
        raise click.UsageError("--json needs a FILE for the payload: stdout holds the JSON document")
    with open_store(store_path, degraded=degraded, read_only=True) as store:
        info = store.entry(key)
        content = None if info is None else _content(store, info, npy)
    if info is None or content is None:
        what = "not stored" if info is None else "stored, but its content failed verification"
        output.document(
            {"key": key_text(key), "found": False, "reason": what},
            lambda: output.note(f"blockkv: {key_text(key)}: {what}"),
        )
        return ExitCode.NEGATIVE
    if file == "-":
        with standard_output() as stream:
            stream.write(content)
        return None
    with private_file(file) as target:
        target.write(content)
    document = {
        "key": key_text(key),
        "found": True,
        "payload_bytes": info.payload_bytes,
        "layout": str(info.layout),
    }
    output.document(
        document,
        lambda: click.echo(f"{key_text(key)}: {size_text(info.payload_bytes)} written to {file}"),
    )
    return None


def _content(store: blockkv.Store, info: ChunkInfo, npy: bool) -> mmap.mmap | bytes | None:
    """The bytes to write out for the chunk `info` describes; None when it did not verify."""
    if not npy:
        memory = mmap.mmap(-1, info.payload_bytes)
        return memory if store.get(info.key, out=memory) else None
    import io

    import numpy as np

    if info.layout.form != "tensor":
        raise InvalidArgument(f"{key_text(info.key)} is {info.layout}; --npy writes single tensors only")
    tensor = store.get(info.key)
    if tensor is None:
        return None
    file = io.BytesIO()
    try:
        np.save(file, tensor.numpy(), allow_pickle=False)
    except TypeError as error:
        raise InvalidArgument(f"{key_text(info.key)}: NumPy has no {info.layout.specs[0].dtype}") from error
    return file.getvalue()


@command("rm", examples=["rm /dev/nvme1n1 my-key hex:00ff"])
@store_argument
@degraded_option
@click.argument("keys", nargs=-1, required=True)
def rm(output: Output, store_path: StorePath, degraded: bool, keys: tuple[str, ...]) -> int:
    """Delete chunks. Exits 1 when one of the KEYS was not stored; the others are deleted all the same."""
    wanted = [parse_key(key) for key in keys]
    with open_store(store_path, degraded=degraded) as store:
        deleted = [store.delete(key) for key in wanted]
    rows = [{"key": key_text(key), "deleted": done} for key, done in zip(wanted, deleted, strict=True)]

    def text() -> None:
        for row in rows:
            if row["deleted"]:
                click.echo(f"{row['key']}: deleted")
            else:
                output.note(f"blockkv: {row['key']}: not stored")

    output.document({"keys": rows}, text)
    return ExitCode.OK if all(deleted) else ExitCode.NEGATIVE
