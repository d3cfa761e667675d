"""What the chunks of LMCache's objects are called, and which of them may be exchanged.

LMCache's keys name the model, the rank, the object group, the hash of the tokens and a salt: neither weights
nor dtype nor shapes. Weights are an option; the others are in the objects, and so they are in the key of a
chunk::

    <family>/<model>@<kv rank>@<object group>@<hash>@<dtypes and shapes>@<salt>

The family is a digest of model, weights, dtypes and shapes, LMCache's release (how objects look inside may
change with it) and the option `layout`.

Invariants
  * LMCache's key can be made again from that of a chunk, which a restart needs;
  * objects that differ in any of these share no chunk;
  * a model whose weights were not named has no chunks.

Not here: which chunks there are (`books`).
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj

import blockkv

__all__ = ["Namespace"]

FIELDS = 6
"""Of a key after the family; none can hold an @, by LMCache's own rules and those of the option `layout`."""

_SERIALIZED = re.compile(r"uint8\[\d+\]")

log = logging.getLogger(__name__)


class Namespace:
    """Names of chunks: from LMCache's keys, and back. Thread-safe."""

    def __init__(self, weights: str | Mapping[str, str], layout: str = "") -> None:
        self.layout = layout
        self._weights = weights
        self._release = _lmcache_release()
        self._families: dict[tuple[str, str], str] = {}
        self._layouts: dict[tuple[Any, ...], str] = {}
        self._unnamed: set[str] = set()

    def layout_of(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> str:
        """Dtypes and shapes as text; "" where there are none."""
        known = (*map(tuple, shapes), *dtypes)
        text = self._layouts.get(known)
        if text is None:
            text = "+".join(
                f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
            self._layouts[known] = text
        return text

    def layout_of_object(self, obj: MemoryObj) -> str:
        """Of the memory of an object."""
        meta = obj.metadata
        if meta.shapes and meta.dtypes:
            return self.layout_of(meta.shapes, meta.dtypes)
        return self.layout_of([meta.shape], [meta.dtype])

    def family(self, model: str, layout: str) -> str:
        """The name of the family, or "" for a model whose weights were not named."""
        name = self._families.get((model, layout))
        if name is None:
            weights = self._weights if isinstance(self._weights, str) else self._weights.get(model)
            if not weights:
                self._tell_unnamed(model)
                return ""
            name = blockkv.Family(
                model=f"LMCache: {model}",
                weights=weights,
                dtype=layout,
                layout=f"object of LMCache {self._release}; {self.layout}",
            ).name
            self._families[model, layout] = name
        return name

    def chunk(self, key: ObjectKey, layout: str) -> str:
        """The key of the chunk, or "" for a model whose weights were not named."""
        family = self.family(key.model_name, layout)
        if not family:
            return ""
        return (
            f"{family}/{key.model_name}@{key.kv_rank:x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
            f"@{layout}@{key.cache_salt}"
        )

    def object_of(self, chunk: str | bytes) -> tuple[ObjectKey, str] | None:
        """LMCache's key of a chunk, and the layout of the object. None for a chunk that is not ours."""
        if isinstance(chunk, bytes):
            return None
        family, _, rest = chunk.partition("/")
        fields = rest.split("@")
        if len(fields) != FIELDS:
            return None
        model, rank, group, hash_, layout, salt = fields
        is_named = isinstance(self._weights, str) or model in self._weights
        if not (is_named and layout and self.family(model, layout) == family):
            return None
        try:
            return ObjectKey(bytes.fromhex(hash_), model, int(rank, 16), int(group, 16), salt), layout
        except ValueError:
            return None

    def _tell_unnamed(self, model: str) -> None:
        if model not in self._unnamed:
            self._unnamed.add(model)
            log.warning(
                "%r is not cached: its weights have no fingerprint; name it in the option weights, beside %s",
                model,
                ", ".join(map(repr, self._weights)),
            )


def is_serialized(layout: str) -> bool:
    """Whether objects of this layout are plain bytes: nothing in it says what those were made from."""
    return _SERIALIZED.fullmatch(layout) is not None


def _lmcache_release() -> str:
    """The release without what follows it: 0.5.7 of 0.5.7rc2."""
    version = importlib.metadata.version("lmcache")
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else version
