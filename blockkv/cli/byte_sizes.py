"""Sizes and rates on the command line: "64MiB", "1G", "200MiB/s"; and in the other direction."""

from __future__ import annotations

import click

from blockkv.errors import InvalidArgument


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A number of bytes, written as the library reads it: 4096, 64KiB, 1.5G; all units are binary."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of `value`; a usage error for anything that is not a positive number of them."""
        if isinstance(value, int):
            return value
        from blockkv.store import parse_size

        try:
            size_bytes = parse_size(str(value))
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)
        if size_bytes < 1:
            self.fail(f"{value!r} is less than one byte", param, ctx)
        return size_bytes


class Rate(Size):
    """Bytes a second: a size, with or without "/s"."""

    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes a second of `value`; a usage error for anything that is not a positive number of them."""
        return super().convert(value.removesuffix("/s") if isinstance(value, str) else value, param, ctx)


def size_text(size_bytes: int) -> str:
    """`size_bytes` for people: "512 B", "1.5 GiB"."""
    amount, unit = float(size_bytes), "B"
    for following in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, following
    return f"{size_bytes} B" if unit == "B" else f"{amount:.4g} {unit}"
