"""Sizes on the command line: "64MiB", "1G", "4096"; and in the other direction."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?B)?|B)?", re.IGNORECASE)


class Size(click.ParamType):
    """A number of bytes. K, M, G, T, P and KiB .. PiB are powers of 1024, KB .. PB powers of 1000."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of `value`; a usage error for anything that is not a whole, positive number of them."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write it like 4096, 64MiB, 1G or 1.5T", param, ctx)
        number, unit, suffix = match[1], (match[2] or "").upper(), (match[3] or "").upper()
        power = "KMGTP".index(unit) + 1 if unit else 0
        amount = float(number) * (1000 if suffix == "B" else 1024) ** power
        if amount < 1 or amount != int(amount):
            self.fail(f"{value!r} is not a whole number of bytes above 0", param, ctx)
        return int(amount)


def size_text(size_bytes: int) -> str:
    """`size_bytes` for people: "512 B", "1.5 GiB"."""
    amount, unit = float(size_bytes), "B"
    for following in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, following
    return f"{size_bytes} B" if unit == "B" else f"{amount:.4g} {unit}"
