"""Keys of prefixes: equal exactly where whole prefixes, and all that their bytes depend on, are equal."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blockkv
from blockkv.errors import InvalidArgument
from blockkv.prefix import Family, PrefixChain, prefix_keys

MINE = Family(model="llama", weights=b"\1\2", dtype="float16", layout="lkhtd", salt="tenant-a")
OTHERS: dict[str, Any] = {
    "model": "llama-2",
    "weights": b"\1\3",
    "dtype": "bfloat16",
    "layout": "lkthd",
    "tensor_rank": 1,
    "tensor_ranks": 4,
    "pipeline_rank": 1,
    "pipeline_ranks": 4,
    "salt": "tenant-b",
}
RANKED = replace(MINE, tensor_ranks=2, pipeline_ranks=2)
TOKENS = list(range(64))


def test_one_key_for_each_whole_chunk() -> None:
    assert [len(prefix_keys(TOKENS[:count], 16, MINE)) for count in (0, 15, 16, 63, 64)] == [0, 0, 1, 3, 4]


def test_keys_of_a_prefix_are_a_prefix_of_the_keys() -> None:
    assert prefix_keys(TOKENS, 16, MINE)[:2] == prefix_keys(TOKENS[:40], 16, MINE)


@given(st.integers(0, 63), st.integers(1, 1000))
def test_a_changed_token_changes_its_key_and_all_later_ones(position: int, change: int) -> None:
    changed = list(TOKENS)
    changed[position] += change
    before, after = prefix_keys(TOKENS, 16, MINE), prefix_keys(changed, 16, MINE)
    chunk = position // 16
    assert before[:chunk] == after[:chunk]
    assert not set(before[chunk:]) & set(after[chunk:])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.data())
def test_a_chain_gives_the_same_keys_however_it_grows(tokens: list[int], data: st.DataObject) -> None:
    chain, keys, at = PrefixChain(7, MINE), [], 0
    while at < len(tokens):
        end = data.draw(st.integers(at + 1, len(tokens)))
        keys += chain.extend(tokens[at:end])
        at = end
    assert keys == prefix_keys(tokens, 7, MINE)


def test_every_field_of_a_family_keeps_caches_apart() -> None:
    assert OTHERS.keys() == {field.name for field in fields(Family)}
    mine = set(prefix_keys(TOKENS, 16, RANKED))
    for name, value in OTHERS.items():
        other = replace(RANKED, **{name: value})
        assert RANKED.differences(other) == (name,)
        assert mine.isdisjoint(prefix_keys(TOKENS, 16, other)), name
    assert mine.isdisjoint(prefix_keys(TOKENS, 32, RANKED))
    assert RANKED.differences(replace(RANKED)) == ()


def test_fields_do_not_run_into_each_other() -> None:
    one = Family(model="ab", weights="c", dtype="d", layout="e")
    assert one.digest != Family(model="a", weights="bc", dtype="d", layout="e").digest
    assert one.digest != replace(one, weights=b"c").digest


def test_keys_stay_what_they_are() -> None:
    """Stores outlive versions: other keys would be a cold cache."""
    assert MINE.name == "ccf4fc56bb69247c"
    assert prefix_keys([1, 2, 3, 4], 4, MINE) == [
        "ccf4fc56bb69247c/4f164d76359f047c278010a40335d770443d96a36e3b57ae87c2157e5baa801e"
    ]


def test_arrays_and_tensors_of_tokens_are_taken() -> None:
    keys = prefix_keys(TOKENS, 16, MINE)
    assert prefix_keys(np.array(TOKENS, np.int16), 16, MINE) == keys
    assert prefix_keys(torch.tensor(TOKENS), 16, MINE) == keys  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [[1, 2]], [2**70], 5, [None]])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match="token ids are"):
        prefix_keys(tokens, 1, MINE)


@pytest.mark.parametrize(
    "wrong", [{"model": ""}, {"weights": b""}, {"tensor_rank": 1}, {"pipeline_rank": -1}, {"tensor_ranks": 0}]
)
def test_a_family_that_says_too_little_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        replace(MINE, **wrong)


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(InvalidArgument, match="chunk_tokens"):
        prefix_keys(TOKENS, 0, MINE)


def test_lookup_finds_the_longest_stored_prefix(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="32MiB")
    keys = prefix_keys(TOKENS, 8, MINE)
    with blockkv.open(path) as store:
        store.put_many([(key, key.encode()) for number, key in enumerate(keys) if number != 5])
        assert store.lookup(keys) == 5
        assert store.lookup(prefix_keys(TOKENS, 8, replace(MINE, dtype="float32"))) == 0
        assert bytes(store.get(keys[4])) == keys[4].encode()
