"""Sizes as people write them."""

import click
import pytest

from blockkv.cli.byte_sizes import Size, size_text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("1K", 1024),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1G", 1 << 30),
        ("1.5T", 3 << 39),
        ("2P", 2 << 50),
        ("1KB", 1024),
    ],
)
def test_size(text: str, size_bytes: int) -> None:
    assert Size().convert(text, None, None) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1X", "0.5", "1 G B", "1e9", "KiB", "1KiBs"])
def test_what_is_not_a_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 40, "1 TiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_size_text(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
