"""The `blockkv` command line.

  app.py        the command itself: errors, exit codes, what all commands share
  store.py      format, info                chunk.py  ls, put, get, rm      check.py  check, scrub
  inspect.py    what is on the device         bench.py  beside fio          demo.py  the whole story
  kv_size.py    calibrate, size               output.py text, JSON, progress    byte_sizes.py  "64MiB"
  doctor.py, examine.py  does the machine suit      top.py  what stores do right now
  serve.py      serve                         archive.py  copy, dump, load    exit_code.py
  map.py        a picture of the data zone    protection.py   key-slots, wipe
  standard_streams.py  where they are closed

Invariant: importing this package imports neither torch nor rich; `blockkv --help` is instant. Commands
import what they need when they run.
"""

from blockkv.cli import (
    archive,
    bench,
    check,
    chunk,
    demo,
    doctor,
    inspect,
    kv_size,
    map,
    protection,
    serve,
    store,
    top,
)
from blockkv.cli.app import cli
from blockkv.cli.standard_streams import open_standard_streams

__all__ = [
    "archive",
    "bench",
    "check",
    "chunk",
    "cli",
    "demo",
    "doctor",
    "inspect",
    "kv_size",
    "main",
    "map",
    "protection",
    "serve",
    "store",
    "top",
]


def main() -> None:
    """Entry point of the `blockkv` script: run the command line and exit."""
    open_standard_streams()
    cli.main()
