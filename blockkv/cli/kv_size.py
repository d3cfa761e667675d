"""`blockkv calibrate` and `blockkv size`: what loading takes, how big a KV cache is, whether loading pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockkv.cli.app import StorePath, command, open_store, store_argument
from blockkv.cli.byte_sizes import Size, size_text
from blockkv.cli.output import Output, fields, lines
from blockkv.errors import InvalidArgument
from blockkv.kv_size import DTYPE_BYTES, KVSize, LoadTime

if TYPE_CHECKING:
    from blockkv.bench.calibrate import Calibration

GIGA = 1e9

prefill_option = click.option(
    "--prefill",
    "prefill_tokens_per_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Tokens a second that the model computes of a prompt, on one replica.",
)
dtype_option = click.option(
    "--dtype", type=click.Choice(list(DTYPE_BYTES)), help="Of the values in the cache."
)


@command("calibrate", examples=["calibrate /dev/nvme1n1 --chunk 1MiB --json > calibration.json"])
@store_argument
@click.option(
    "--chunk", "chunk_bytes", type=Size(), default="2MiB", show_default=True, help="Size of the chunks."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Reads of each size."
)
@click.option("--model", "config_path", type=click.Path(), help="A config.json, to say from when on it pays.")
@dtype_option
@prefill_option
def calibrate(
    output: Output,
    store_path: StorePath,
    chunk_bytes: int,
    rounds: int,
    config_path: str | None,
    dtype: str | None,
    prefill_tokens_per_s: float | None,
) -> None:
    """Measure what loading takes in STORE: seconds for a request, and seconds for each byte.

    Puts 32 chunks of its own, reads them in requests of 1 to 32 chunks, and deletes them; nothing is evicted.
    Five sizes are measured that the line does not go through, and compared with it. Keep the JSON for
    `blockkv size --calibration`.
    """
    from blockkv.bench.calibrate import calibrate as measure

    with open_store(store_path, evict=False) as store, output.progress() as advance:
        found = measure(store, chunk_bytes, rounds, lambda done, total: advance("reading", done, total))
    document = {
        "store": store_path,
        "chunk_bytes": found.chunk_bytes,
        "load_s": found.load.seconds,
        "load_s_per_byte": found.load.seconds_per_byte,
        "load_bytes_per_s": found.load.bytes_per_s,
        "samples": [{"size_bytes": size, "measured_s": seconds} for size, seconds in found.samples],
        "comparisons": [
            {
                "size_bytes": one.size_bytes,
                "measured_s": one.measured_s,
                "predicted_s": one.predicted_s,
                "error": one.error,
            }
            for one in found.comparisons
        ],
    }
    pays: list[tuple[str, object]] = []
    if config_path is not None:
        size = KVSize.of_config(read_config(config_path), dtype)
        if prefill_tokens_per_s is not None:
            more, pays = break_even(size, found.load, prefill_tokens_per_s)
            document |= more
    output.document(document, lambda: _show_calibration(found, pays))


def _show_calibration(found: Calibration, pays: list[tuple[str, object]]) -> None:
    fields(
        [
            ("each request", f"{found.load.seconds * 1e3:.3f} ms"),
            ("beyond that", f"{found.load.bytes_per_s / GIGA:.2f} GB/s"),
            *pays,
        ]
    )
    click.echo()
    lines(
        [
            [
                size_text(one.size_bytes),
                f"{one.measured_s * 1e3:.3f}",
                f"{one.predicted_s * 1e3:.3f}",
                f"{one.error:+.1%}",
            ]
            for one in found.comparisons
        ],
        ["not fitted", "measured ms", "predicted ms", "error"],
        right="rrrr",
    )


@command(
    "size",
    examples=[
        "size model/config.json --context 131072",
        "size --layers 32 --kv-heads 8 --head-dim 128 --prefill 15000 --bandwidth 7",
    ],
)
@click.argument("config_path", metavar="[MODEL_CONFIG]", required=False, type=click.Path())
@click.option("--layers", type=click.IntRange(min=1), help="Instead of MODEL_CONFIG, with the next two.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Heads of K and of V in a layer.")
@click.option("--head-dim", type=click.IntRange(min=1), help="Values of a head.")
@dtype_option
@click.option(
    "--context", "tokens", type=click.IntRange(min=1), default=131072, show_default=True, help="Tokens."
)
@prefill_option
@click.option("--calibration", "calibration_path", type=click.Path(), help="What `calibrate --json` printed.")
@click.option(
    "--bandwidth", "gb_per_s", type=click.FloatRange(min=0, min_open=True), help="Instead of that: GB/s."
)
@click.option(
    "--request-ms", type=click.FloatRange(min=0), default=0.0, show_default=True, help="And ms a request."
)
def size(
    output: Output,
    config_path: str | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    dtype: str | None,
    tokens: int,
    prefill_tokens_per_s: float | None,
    calibration_path: str | None,
    gb_per_s: float | None,
    request_ms: float,
) -> None:
    """Say how big the KV cache of a model is, how long it takes to load, and whether that pays.

    MODEL_CONFIG is a Hugging Face config.json, or the directory that holds it.
    """
    if (config_path is None) == (layers is None):
        raise click.UsageError("give MODEL_CONFIG, or --layers, --kv-heads and --head-dim")
    if config_path is not None:
        found = KVSize.of_config(read_config(config_path), dtype)
    elif layers is None or kv_heads is None or head_dim is None:
        raise click.UsageError("--layers, --kv-heads and --head-dim go together")
    else:
        found = KVSize.of_heads(layers, kv_heads, head_dim, dtype or "float16")
    load: LoadTime | None = None
    if calibration_path is not None:
        load = read_calibration(calibration_path)
    elif gb_per_s is not None:
        load = LoadTime(request_ms / 1e3, 1 / (gb_per_s * GIGA))
    size_bytes = found.size_bytes(tokens)
    document: dict[str, Any] = {
        "context_tokens": tokens,
        "bytes_per_token": found.bytes_per_token,
        "size_bytes": size_bytes,
        "groups": [
            {
                "what": group.what,
                "layers": group.layers,
                "bytes_per_token": group.bytes_per_token,
                "window_tokens": group.window_tokens,
                "size_bytes": group.size_bytes(tokens),
            }
            for group in found.groups
        ],
        "state_layers": found.state_layers,
    }
    shown: list[tuple[str, object]] = [
        ("a token", f"{found.bytes_per_token:,} bytes"),
        (f"{tokens:,} tokens", size_text(size_bytes)),
    ]
    for group in found.groups:
        window = "" if group.window_tokens is None else f", the last {group.window_tokens:,} tokens"
        shown.append(
            (f"  {group.layers} layers", f"{size_text(group.size_bytes(tokens))}, {group.what}{window}")
        )
    if found.state_layers:
        shown.append((f"  {found.state_layers} layers", "a state of fixed size, not counted"))
    if load is not None:
        document["load_s"] = load.of(size_bytes)
        shown.append(("loading", f"{document['load_s']:.3f} s"))
    if prefill_tokens_per_s is not None:
        document["prefill_s"] = tokens / prefill_tokens_per_s
        document["break_even_bytes_per_s"] = found.break_even_bytes_per_s(prefill_tokens_per_s, tokens)
        shown.append(("computing", f"{document['prefill_s']:.3f} s"))
        if load is None:
            shown.append(("pays from", f"{document['break_even_bytes_per_s'] / GIGA:.2f} GB/s on"))
        else:
            more, pays = break_even(found, load, prefill_tokens_per_s)
            document |= more
            document["pays"] = document["load_s"] < document["prefill_s"]
            shown += [*pays, ("it pays" if document["pays"] else "it does not pay", _ratio(document))]
    output.document(document, lambda: fields(shown))


def _ratio(document: dict[str, Any]) -> str:
    return f"loading takes {document['load_s'] / document['prefill_s']:.2f} of computing"


def break_even(
    size: KVSize, load: LoadTime, prefill_tokens_per_s: float
) -> tuple[dict[str, Any], list[tuple[str, object]]]:
    """From when on loading pays, for JSON and for people."""
    rate = size.break_even_bytes_per_s(prefill_tokens_per_s)
    tokens = size.break_even_tokens(load, prefill_tokens_per_s)
    return {
        "break_even_token_bytes_per_s": rate,
        "break_even_tokens": tokens,
    }, [
        ("break-even", f"{rate / GIGA:.2f} GB/s, this store loads {load.bytes_per_s / GIGA:.2f}"),
        ("pays from", "no length on" if tokens is None else f"{tokens:,} tokens on"),
    ]


def read_config(path: str) -> dict[str, Any]:
    """A config.json, or that of a directory. Raises InvalidArgument, or OSError where there is none."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{file} holds no JSON object, so it is no model's configuration")
    return config


def read_calibration(path: str) -> LoadTime:
    """What `blockkv calibrate --json` printed. Raises InvalidArgument, or OSError where there is none."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        load = LoadTime(float(document["load_s"]), float(document["load_s_per_byte"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is not what `blockkv calibrate --json` prints: {error!r}") from error
    if load.seconds < 0 or load.seconds_per_byte <= 0:
        raise InvalidArgument(f"{path} says that loading takes no time; measure again")
    return load
