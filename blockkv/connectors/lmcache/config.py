"""The options of the LMCache connectors, and the store that they name.

Invariants
  * an option that there is none of is refused by name, and so is a value that makes no sense: before LMCache
    starts;
  * weights are named by whoever starts LMCache, for it knows models by name only;
  * nothing is formatted but, when asked to, what is blank.

Not here: what the options do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

import blockkv
from blockkv.connectors import opening

__all__ = ["BlockKVL2AdapterConfig", "open_store"]

DEFAULT_LOCK_S = 600.0
"""LMCache unlocks when a load has ended. It keeps what it reads locked for 300 s at most
(`l1_read_ttl_seconds`), so after twice that nobody comes any more.
"""

MOST_THREADS = 64

OPTIONS = {
    "device": "path of the namespace, partition, loop device or file, a list of those of an array, or the "
    "socket of `blockkv serve` (required)",
    "weights": 'fingerprint of the weights, or {"model name": "fingerprint"}; models without one are not '
    "cached (required)",
    "format": "whether to make a store on a device that is blank (false)",
    "layout": "what else the bytes depend on and objects do not say: how LMCache serializes them, the "
    "engine's kv_cache_layout (none)",
    "durable": "whether a store is acknowledged only when it survives a loss of power (true)",
    "lock_s": f"seconds after which a lock ends that was not unlocked ({DEFAULT_LOCK_S:g})",
    "load_deadline_s": "seconds after which a load ends as a miss, also when the device hangs; costs a copy "
    "(none)",
    "store_deadline_s": "seconds after which a store that has not begun is dropped (none)",
    "max_store_bytes": "bytes of stores that may wait; more are dropped (the size of L1)",
    "load_threads": "loads carried out at once (4)",
    "store_threads": "stores carried out at once (2)",
    "eviction": 'who leaves when the device is full: "lru", "prefix" or "s3fifo" (lru)',
    "admission": 'what is written at all: "all", "twice" or "adaptive" (all)',
    "discard": "whether to tell the device of freed space (false)",
}


class BlockKVL2AdapterConfig(L2AdapterConfigBase):
    """The options in `adapter_params`."""

    def __init__(
        self,
        device: str | Sequence[str],
        weights: str | Mapping[str, str],
        *,
        format: bool = False,
        layout: str = "",
        durable: bool = True,
        lock_s: float = DEFAULT_LOCK_S,
        load_deadline_s: float | None = None,
        store_deadline_s: float | None = None,
        max_store_bytes: int | None = None,
        load_threads: int = 4,
        store_threads: int = 2,
        eviction: str = "lru",
        admission: str = "all",
        discard: bool = False,
    ) -> None:
        """Raises ValueError for what makes no sense; `help` says what each option is."""
        super().__init__()
        paths = [device] if isinstance(device, str) else device
        if not isinstance(paths, list | tuple) or not paths or not all(map(_is_text, paths)):
            raise ValueError(f"device is {device!r}; give a path, or a list of paths")
        _check_weights(weights)
        if not isinstance(layout, str) or "@" in layout:
            raise ValueError(f"layout is {layout!r}; use a text without @")
        for name, flag in (("format", format), ("durable", durable), ("discard", discard)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} is {flag!r}; use true or false")
        for name, number in (
            ("lock_s", lock_s),
            ("load_deadline_s", load_deadline_s),
            ("store_deadline_s", store_deadline_s),
            ("max_store_bytes", max_store_bytes),
        ):
            if number is not None and not (_is_number(number) and number > 0):
                raise ValueError(f"{name} is {number!r}; use a number above 0")
        for name, count in (("load_threads", load_threads), ("store_threads", store_threads)):
            if not (_is_number(count) and isinstance(count, int) and 1 <= count <= MOST_THREADS):
                raise ValueError(f"{name} is {count!r}; use 1 to {MOST_THREADS}")
        self.devices = list(paths)
        self.weights = weights
        self.format = format
        self.layout = layout
        self.durable = durable
        self.lock_s = lock_s
        self.load_deadline_s = load_deadline_s
        self.store_deadline_s = store_deadline_s
        self.max_store_bytes = max_store_bytes
        self.load_threads = load_threads
        self.store_threads = store_threads
        self.eviction = eviction
        self.admission = admission
        self.discard = discard

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> BlockKVL2AdapterConfig:
        """From `adapter_params`. Raises ValueError."""
        unknown = sorted(d.keys() - OPTIONS.keys())
        if unknown:
            raise ValueError(f"unknown: {', '.join(unknown)}; the options are {', '.join(OPTIONS)}")
        for name in ("device", "weights"):
            if name not in d:
                raise ValueError(f"give {name}: {OPTIONS[name]}")
        return cls(**d)

    @classmethod
    def help(cls) -> str:
        """The options, one a line."""
        return "\n".join(["blockkv options:", *(f"- {name}: {text}" for name, text in OPTIONS.items())])

    @property
    def where(self) -> str:
        """For messages: what the store is on."""
        return ", ".join(self.devices)


def open_store(options: BlockKVL2AdapterConfig) -> blockkv.Store:
    """The store on the device; with `format` made there, if that is blank.

    Raises what `blockkv.open` and `blockkv.format` raise.
    """
    chosen: dict[str, Any] = {}
    if options.eviction != "lru":
        chosen["eviction"] = options.eviction
    if options.admission != "all":
        chosen["admission"] = options.admission
    if options.discard:
        chosen["discard"] = True
    return opening.open_store(options.devices, format=options.format, **chosen)


def _check_weights(weights: Any) -> None:
    by_model = isinstance(weights, Mapping) and weights
    named = [*weights, *weights.values()] if by_model else [weights]
    if not all(map(_is_text, named)):
        raise ValueError(
            f"weights is {weights!r}; give a fingerprint of the weights (a digest of the files, or the "
            'commit they came with), or {"model name": "fingerprint"}: LMCache has only names of models, and '
            "another one under that name would be given what this one has computed"
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
