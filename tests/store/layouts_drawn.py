"""Layouts and parts as hypothesis draws them, and what numpy makes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from blockkv.kv_layout import Axis, KVArray, KVLayout, Part

DTYPES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int64": 8}


@st.composite
def axes(draw: Any, most: int, widest: int) -> Axis:
    name = draw(st.sampled_from(["layers", "tokens", "heads", "kv", "dim", "latent"]))
    if name == "kv":
        return Axis(name, draw(st.sampled_from([range(2), range(1), range(1, 2)])))
    if name in ("dim", "latent"):
        return Axis(name, range(draw(st.integers(1, most) | st.integers(1, widest))))
    if draw(st.booleans()):
        start = draw(st.integers(0, 5))
        return Axis(name, range(start, start + draw(st.integers(1, most))))
    return Axis(name, tuple(sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=most)))))


@st.composite
def layouts(draw: Any, most: int = 6, widest: int = 6, arrays: int = 3) -> KVLayout:
    """Up to `arrays` arrays with axes in any order, of up to `most` positions each; those that are never
    divided have up to `widest`.
    """
    found = []
    for number in range(draw(st.integers(1, arrays))):
        chosen = draw(st.lists(axes(most, widest), min_size=1, max_size=5, unique_by=lambda axis: axis.name))
        found.append(KVArray(tuple(chosen), draw(st.sampled_from(sorted(DTYPES))), f"array {number}"))
    return KVLayout(tuple(found))


def chosen(limit: int = 13) -> st.SearchStrategy[Any]:
    """What a part says of an axis."""
    ranges = st.tuples(st.integers(0, limit), st.integers(1, limit)).map(lambda two: range(two[0], sum(two)))
    return st.none() | st.integers(0, limit) | ranges


def parts() -> st.SearchStrategy[Part]:
    return st.builds(
        Part, layers=chosen(), tokens=chosen(), heads=chosen(), kv=st.sampled_from([None, "k", "v"])
    )


def sliced(layout: KVLayout, part: Part, payload: np.ndarray) -> dict[str, np.ndarray]:
    """What numpy takes from the payload for a part: for each array its elements, of `item` bytes each."""
    found = {}
    start = 0
    for array in layout.arrays:
        item = DTYPES[array.dtype]
        shape = [axis.size for axis in array.axes]
        size = math.prod(shape) * item
        taken = payload[start : start + size].reshape(*shape, item)
        start += size
        for place, axis in enumerate(array.axes):
            wanted = part.along(axis.name)
            if wanted is not None:
                among = {wanted} if isinstance(wanted, int) else set(wanted)
                taken = np.compress([number in among for number in axis.numbers], taken, axis=place)
        if taken.size:
            found[array.name] = taken
    return found
