"""`blockkv top`: what stores are doing right now, from their metrics."""

from __future__ import annotations

import contextlib
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from blockkv.cli.app import command
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.endurance import Endurance, days_left, of_device
from blockkv.cli.output import Output
from blockkv.errors import DeviceError, InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

DAY_S = 86_400
GIGA, TERA = 1e9, 1e12
STALL_S = 0.1
"""A call that takes longer is a stall."""
TIMEOUT_S = 10
HERE = ("127.0.0.1", "localhost", "::1")


@dataclass
class Sample:
    """What one store has said of itself so far."""

    at_s: float
    numbers: dict[str, float] = field(default_factory=dict)
    """By the name of `Store.stats`."""
    calls: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    """By operation: calls that took no longer, by seconds."""
    call_s: dict[str, float] = field(default_factory=dict)


def read(url: str) -> dict[str, Sample]:
    """Ask the endpoint; samples by store. Raises DeviceError where it does not answer, InvalidArgument."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise InvalidArgument("`top` needs prometheus-client: pip install 'blockkv[metrics]'") from error
    from blockkv.metrics import COUNTERS, GAUGES, LATENCY, metric_name

    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the scheme is checked
            text = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise DeviceError(f"{url} does not answer: {error}; is a store with metrics open there?") from error
    names = {metric_name(name): name for name in [*GAUGES, *COUNTERS]}
    now_s = time.monotonic()
    samples: dict[str, Sample] = defaultdict(lambda: Sample(now_s))
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            sample = one.labels.get("store")
            if sample is None:
                continue
            if one.name in names:
                samples[sample].numbers[names[one.name]] = one.value
            elif one.name == f"{LATENCY}_bucket":
                samples[sample].calls[one.labels["operation"]][float(one.labels["le"])] = one.value
            elif one.name == f"{LATENCY}_sum":
                samples[sample].call_s[one.labels["operation"]] = one.value
    if not samples:
        raise InvalidArgument(f"{url} has no metrics of a blockkv store")
    return dict(samples)


def percentile_us(buckets: dict[float, float], percent: float) -> float:
    """From numbers of calls that took no longer, by seconds: the bound of the bucket that it is in.

    For calls beyond the last bound that bound, half a minute.
    """
    total = max(buckets.values(), default=0)
    bounds = sorted(bound for bound in buckets if bound < float("inf"))
    if not total or not bounds:
        return 0.0
    return 1e6 * next((bound for bound in bounds if buckets[bound] >= total * percent / 100), bounds[-1])


def figures(before: Sample, after: Sample) -> dict[str, Any]:
    """What happened between two samples of a store."""
    elapsed_s = max(after.at_s - before.at_s, 1e-9)

    def change(name: str) -> float:
        return max(0.0, after.numbers.get(name, 0) - before.numbers.get(name, 0))

    hits, misses = change("get_chunks"), change("get_misses")
    figure: dict[str, Any] = {
        "chunks": int(after.numbers.get("chunks", 0)),
        "payload_bytes": int(after.numbers.get("payload_bytes", 0)),
        "data_bytes": int(after.numbers.get("data_bytes", 0)),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "get_gb_per_s": change("get_bytes") / GIGA / elapsed_s,
        "put_gb_per_s": change("put_bytes") / GIGA / elapsed_s,
        "device_read_gb_per_s": change("device_read_bytes") / GIGA / elapsed_s,
        "device_write_gb_per_s": change("device_write_bytes") / GIGA / elapsed_s,
        "evicted_per_s": change("chunks_evicted") / elapsed_s,
        "dropped_per_s": change("put_dropped") / elapsed_s,
        "damaged": int(after.numbers.get("chunks_dropped_damaged", 0)),
        "written_tb_per_day": change("device_write_bytes") / TERA / elapsed_s * DAY_S,
        "operations": {},
    }
    for operation, buckets in after.calls.items():
        earlier = before.calls.get(operation, {})
        during = {bound: count - earlier.get(bound, 0) for bound, count in buckets.items()}
        calls = max(during.values(), default=0)
        quick = max((count for bound, count in during.items() if bound <= STALL_S), default=0)
        waited_s = after.call_s.get(operation, 0) - before.call_s.get(operation, 0)
        figure["operations"][operation] = {
            "calls_per_s": calls / elapsed_s,
            "in_progress": waited_s / elapsed_s,  # Little's law
            "p50_us": percentile_us(during, 50),
            "p99_us": percentile_us(during, 99),
            "stalls": int(calls - quick),
        }
    return figure


def lifetime(
    figure: dict[str, Any], numbers: dict[str, float], endurance: Endurance | None, rated_tbw: float | None
) -> dict[str, Any]:
    """What `figure` of a store, its numbers since open, its drive and the drive's rating say of endurance.

    None for what nobody tells. The bytes of clients are not among those of the owner they put through, so
    there is no amplification there.
    """
    put_bytes, written_bytes = numbers.get("put_bytes", 0), numbers.get("device_write_bytes", 0)
    has_clients = numbers.get("clients_accepted", 0) > 0
    rate = figure["written_tb_per_day"] * TERA
    rated_bytes = rated_tbw * TERA if rated_tbw else None
    return {
        "written_bytes": int(written_bytes),
        "amplification": written_bytes / put_bytes if put_bytes and not has_clients else None,
        "drive_written_bytes": endurance.written_bytes if endurance else None,
        "drive_amplification": endurance.amplification if endurance else None,
        "used_percent": endurance.used_percent if endurance else None,
        "days_left": days_left(endurance, rate, endurance.life_bytes) if endurance else None,
        "days_to_rated": days_left(endurance, rate, rated_bytes) if endurance else None,
    }


def drives_of(url: str, stores: Iterable[str]) -> dict[str, Endurance | None]:
    """The endurance of the drive of each store, where the endpoint, and so the drive, is on this machine."""
    here = urllib.parse.urlsplit(url).hostname in HERE
    return {store: of_device(store)[0] if here else None for store in stores}


@command("top", examples=["top http://127.0.0.1:9105/metrics --rated-tbw 600", "top --once --json"])
@click.argument("url", default="http://127.0.0.1:9105/metrics")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Show one interval and end; so does --json.")
@click.option(
    "--rated-tbw",
    type=click.FloatRange(0, min_open=True),
    help="Terabytes the drive may be written, by its maker.",
)
def top(output: Output, url: str, interval_s: float, once: bool, rated_tbw: float | None) -> None:
    """Show what the stores of a process are doing: their metrics at URL, every few seconds, until Ctrl-C.

    Hit rate, bytes a second, calls in progress and how long they take (the bound of a bucket that doubles, so
    at most), stalls (calls beyond 100 ms), evictions, bytes written to the device, and for how many days the
    drive will stand that, where it is on this machine and tells.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(
            f"{url!r} is no http:// address; a store has one with blockkv.metrics.serve_metrics"
        )
    before = read(url)
    drives = drives_of(url, before)

    def interval() -> dict[str, dict[str, Any]]:
        nonlocal before
        time.sleep(interval_s)
        earlier, before = before, read(url)
        shown = {}
        for store, sample in before.items():
            figure = figures(earlier.get(store, sample), sample)
            shown[store] = figure | lifetime(figure, sample.numbers, drives.get(store), rated_tbw)
        return shown

    shown = interval()
    if once or output.as_json or not sys.stdout.isatty():
        output.document(shown, lambda: _print(shown, rated_tbw))
        return
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(_table(shown, rated_tbw), auto_refresh=False) as live:
        while True:
            live.update(_table(interval(), rated_tbw), refresh=True)


def _print(shown: dict[str, dict[str, Any]], rated_tbw: float | None) -> None:
    from rich.console import Console

    Console().print(_table(shown, rated_tbw))


def _table(shown: dict[str, dict[str, Any]], rated_tbw: float | None) -> Table:
    from rich.table import Table

    table = Table(show_header=True)
    table.add_column("")
    rows: dict[str, list[str]] = defaultdict(list)
    for store, one in shown.items():
        table.add_column(store, justify="right")
        rate = one["hit_rate"]
        rows["hit rate"].append("-" if rate is None else f"{rate:.1%}")
        rows["get, put GB/s"].append(f"{one['get_gb_per_s']:.2f}, {one['put_gb_per_s']:.2f}")
        rows["device read, write GB/s"].append(
            f"{one['device_read_gb_per_s']:.2f}, {one['device_write_gb_per_s']:.2f}"
        )
        for operation, calls in one["operations"].items():
            name = operation.replace("_", " ")
            rows[f"{name}: calls/s, in progress"].append(
                f"{calls['calls_per_s']:.0f}, {calls['in_progress']:.1f}"
            )
            rows[f"{name}: p50, p99 us"].append(f"{calls['p50_us']:.0f}, {calls['p99_us']:.0f}")
            rows[f"{name}: stalls"].append(str(calls["stalls"]))
        rows["chunks"].append(f"{one['chunks']:,}")
        rows["payload, of"].append(f"{size_text(one['payload_bytes'])}, {size_text(one['data_bytes'])}")
        rows["evicted/s, dropped/s"].append(f"{one['evicted_per_s']:.1f}, {one['dropped_per_s']:.1f}")
        rows["damaged since open"].append(str(one["damaged"]))
        written = one["written_tb_per_day"]
        text = f"{written:.2f}"
        if rated_tbw and written and one["days_to_rated"] is None:
            text += f", {rated_tbw / written:,.0f} days to {rated_tbw:g} TB"
        rows["TB written a day, at this rate"].append(text)
        rows["written since open, for each byte put"].append(
            f"{size_text(one['written_bytes'])}, {_number(one['amplification'], '.2f')}"
        )
        if one["drive_written_bytes"] is not None:
            rows["the drive: TB written, of its life, for each byte"].append(
                f"{one['drive_written_bytes'] / TERA:,.1f}, {one['used_percent']} %, "
                f"{_number(one['drive_amplification'], '.2f')}"
            )
            text = _number(one["days_left"], ",.0f")
            if rated_tbw:
                text += f", to {rated_tbw:g} TB {_number(one['days_to_rated'], ',.0f')}"
            rows["days it lasts, at this rate"].append(text)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
