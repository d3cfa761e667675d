"""`blockkv serve`: hold a store open for other processes, until told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

import blockkv
from blockkv.cli.app import StorePath, command, open_store, store_argument
from blockkv.cli.byte_sizes import Rate, Size, size_text
from blockkv.cli.exit_code import ExitCode, exit_code_of
from blockkv.cli.log_output import FORMATS, LEVELS, log_output
from blockkv.cli.output import Output
from blockkv.errors import BlockKVError, DeviceBusy, InvalidArgument
from blockkv.logs import logger_for

if TYPE_CHECKING:
    from blockkv.serving.owner import Owner

logger = logging.getLogger("blockkv")

SWITCH_S = 0.0005
"""How long one thread may keep Python from another that waits: clients wait for answers of microseconds."""
BUSY_RETRY_S = 0.2


class _Mode(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """File permissions in octal."""

    name = "mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            mode = int(value, 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o777:
            self.fail(f"{value!r} is no mode; give it in octal, such as 0660", param, ctx)
        return mode


class _Endpoint(click.ParamType):  # type: ignore[type-arg]
    """Where metrics are asked for."""

    name = "endpoint"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        address, _, port = value.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            self.fail(f"{value!r} has no port; give PORT or ADDRESS:PORT, such as 9105", param, ctx)
        return address.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


@command(
    "serve",
    examples=[
        "serve /dev/nvme1n1 --socket /run/blockkv.sock --mode 0660 --group blockkv",
        "serve /dev/nvme1n1 --socket kv.sock --scrub 50MiB/s --metrics 9105 --log-format json",
    ],
)
@store_argument
@click.option(
    "--socket",
    "socket_at",
    type=click.Path(),
    required=True,
    help="Where clients connect: a Unix socket is made there.",
)
@click.option(
    "--mode",
    type=_Mode(),
    default="0600",
    show_default=True,
    help="Who may connect: permissions of the socket, in octal.",
)
@click.option("--group", help="Group of the socket, by name or number.")
@click.option("--no-evict", is_flag=True, help="Refuse puts when it is full, instead of evicting.")
@click.option("--eviction", default="lru", show_default=True, help="Who leaves: lru, prefix or s3fifo.")
@click.option("--admission", default="all", show_default=True, help="What is written: all, twice, adaptive.")
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="FAMILY=SIZE",
    help="Most bytes of a family; may be given several times.",
)
@click.option("--write-budget", type=Size(), help="Most bytes written in a day, metadata included.")
@click.option("--discard", is_flag=True, help="Tell the device about freed space.")
@click.option(
    "--no-placement", is_flag=True, help="Passthrough only: do not use the placement handles (FDP)."
)
@click.option("--scrub", "scrub_rate", type=Rate(), help="Verify everything, again and again, at this rate.")
@click.option(
    "--commit-interval-ms",
    type=float,
    default=10.0,
    show_default=True,
    help="How soon puts become durable, in milliseconds.",
)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="How long to wait, in seconds, for the clients of an owner that was killed to let go of the device.",
)
@click.option(
    "--metrics",
    "metrics_at",
    type=_Endpoint(),
    metavar="[ADDRESS:]PORT",
    help="Answer Prometheus at http://ADDRESS:PORT/metrics. Port 0: one that is free.  "
    "[default: no metrics; ADDRESS: 127.0.0.1]",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="What is logged, on stderr: lines for people, or one JSON object a line.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    show_default=True,
    help="The least that is logged.",
)
def serve(
    output: Output,
    store_path: StorePath,
    socket_at: str,
    mode: int,
    group: str | None,
    no_evict: bool,
    eviction: str,
    admission: str,
    quotas: tuple[str, ...],
    write_budget: int | None,
    discard: bool,
    no_placement: bool,
    scrub_rate: int | None,
    commit_interval_ms: float,
    wait_s: float,
    metrics_at: tuple[str, int] | None,
    log_format: str,
    log_level: str,
) -> int:
    """Open a store for many processes, and serve its catalog at a socket.

    Clients open the socket as if it were the device (`blockkv.open`, and the STORE of most commands) and read
    and write the device themselves. Ends with SIGTERM or SIGINT: then the store is closed cleanly. Killed, it
    loses what a crash loses; clients go on when it is started again. Tells systemd when it is ready.
    """
    group_id = _group(group)
    with log_output(log_format, log_level):
        try:
            options = {
                "evict": not no_evict,
                "eviction": eviction,
                "admission": admission,
                "quotas": dict(map(_quota, quotas)) or None,
                "write_budget": write_budget,
                "discard": discard,
                "placement": not no_placement,
                "commit_interval_ms": commit_interval_ms,
            }
            place = (socket_at, mode, group_id)
            _serve(output, store_path, options, wait_s, place, scrub_rate, metrics_at, log_format)
        except (BlockKVError, OSError) as error:
            if log_format != "json" or output.as_json:
                raise
            logger.error("%s", error, extra={"store": str(store_path)})
            return exit_code_of(error)
    return ExitCode.OK


def _serve(
    output: Output,
    store_path: StorePath,
    options: dict[str, Any],
    wait_s: float,
    place: tuple[str, int, int | None],
    scrub_rate: int | None,
    metrics_at: tuple[str, int] | None,
    log_format: str,
) -> None:
    """Until a signal ends it. `place`: socket, its mode and group. Raises what opening and closing raise."""
    from blockkv.serving.owner import Owner

    socket_at, mode, group_id = place
    stopper = _Stopper()
    with stopper:
        store = _opened(store_path, options, wait_s)
        try:
            owner = Owner(store, socket_at, mode=mode, group=group_id)
        except BaseException:
            store.close()
            raise
        with contextlib.ExitStack() as stack:
            stack.callback(owner.close)
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(SWITCH_S)
            stopper.owner = owner
            endpoint = None if metrics_at is None else _answer_scrapes(stack, owner, *metrics_at)
            document, line = _facts(owner, endpoint)
            if log_format == "json" and not output.as_json:
                logger.info("%s", line, extra={"store": owner.path})
            else:
                output.document(document, lambda: click.echo(line))
                sys.stdout.flush()
            _notify("READY=1")
            if scrub_rate is not None:
                _scrub_for_ever(store, scrub_rate)
            owner.serve()
            logger_for(owner.path).info(
                "ends: what clients have in flight is waited for, then all is made durable"
            )
            _notify("STOPPING=1")


def _opened(store_path: StorePath, options: dict[str, Any], wait_s: float) -> blockkv.Store:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return open_store(store_path, **options)
        except DeviceBusy:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(BUSY_RETRY_S)


class _Stopper:
    """Makes SIGTERM and SIGINT end the serving."""

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._stop)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.owner is None:
            raise KeyboardInterrupt
        self.owner.stop()


def _scrub_for_ever(store: blockkv.Store, bytes_per_s: int) -> None:
    """One pass after the other. Each ends early when the store is closed."""

    def again(done: Any) -> None:
        with contextlib.suppress(blockkv.BlockKVError):
            if not done.cancelled() and done.exception() is None and done.result().finished:
                time.sleep(BUSY_RETRY_S)  # an empty store would be scrubbed without a pause
                store.start_scrub(bytes_per_s).add_done_callback(again)

    store.start_scrub(bytes_per_s).add_done_callback(again)


def _answer_scrapes(stack: contextlib.ExitStack, owner: Owner, address: str, port: int) -> str:
    """Give the URL. Raises what `serve_metrics` does, saying which address it was."""
    from blockkv.metrics import serve_metrics

    try:
        port = stack.enter_context(serve_metrics(owner, port, address))
    except OSError as error:
        raise OSError(
            error.errno, f"metrics cannot be had at {address}:{port}: {error.strerror or error}"
        ) from None
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"


def _facts(owner: Owner, endpoint: str | None) -> tuple[dict[str, Any], str]:
    """What is served, as a document and as a line."""
    info, stats = owner.info(), owner.stats()
    document = {
        "socket": owner.path,
        "pid": os.getpid(),
        "metrics": endpoint,
        "device": info["path"],
        "uuid": info["uuid"],
        "epoch": info["epoch"],
        "engine": info["engine"],
        "chunks": stats["chunks"],
        "data_bytes": stats["data_bytes"],
        "free_bytes": stats["free_bytes"],
    }

    return document, (
        f"serving {info['path']} at {owner.path}: {stats['chunks']} chunks, "
        f"{size_text(stats['free_bytes'])} of {size_text(stats['data_bytes'])} free"
        + (f"; metrics at {endpoint}" if endpoint else "")
    )


def _notify(state: str) -> None:
    """Tell systemd, where it has started us: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), address)


def _group(name: str | None) -> int | None:
    import grp

    if name is None or name.isdigit():
        return None if name is None else int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise click.BadParameter(f"there is no group {name!r}") from None


def _quota(text: str) -> tuple[str, int]:
    family, equals, size = text.partition("=")
    if not equals:
        raise InvalidArgument(f"the quota {text!r} is none; give FAMILY=SIZE")
    return family, int(Size().convert(size, None, None))
