"""Chained keys: equal keys exactly where whole prefixes are equal."""

from hypothesis import given
from hypothesis import strategies as st

from blockkv.demo.prefix import prefix_keys

MODEL = bytes(32)
TOKENS = list(range(64))


def test_one_key_for_each_whole_chunk() -> None:
    assert len(prefix_keys(TOKENS, MODEL, 16)) == 4
    assert len(prefix_keys(TOKENS[:63], MODEL, 16)) == 3
    assert prefix_keys(TOKENS[:15], MODEL, 16) == []


def test_keys_of_a_prefix_are_a_prefix_of_the_keys() -> None:
    assert prefix_keys(TOKENS, MODEL, 16)[:2] == prefix_keys(TOKENS[:40], MODEL, 16)


@given(st.integers(0, 63))
def test_a_changed_token_changes_its_key_and_all_later_ones(position: int) -> None:
    changed = list(TOKENS)
    changed[position] += 1000
    before, after = prefix_keys(TOKENS, MODEL, 16), prefix_keys(changed, MODEL, 16)
    chunk = position // 16
    assert before[:chunk] == after[:chunk]
    assert not set(before[chunk:]) & set(after[chunk:])


def test_other_weights_chunk_sizes_and_layouts_share_no_key() -> None:
    mine = set(prefix_keys(TOKENS, MODEL, 16))
    for other in (
        prefix_keys(TOKENS, b"\1" + bytes(31), 16),
        prefix_keys(TOKENS, MODEL, 32),
        prefix_keys(TOKENS, MODEL, 16, layout="other"),
    ):
        assert mine.isdisjoint(other)
