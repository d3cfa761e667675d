"""The `blockkv` command: what all of its subcommands share.

Every command takes `--json` and `--debug`, returns its exit code (None: 0), and raises BlockKVError freely:
`App.main` turns whatever ends a command into one line, or one JSON document, and an exit code.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

import blockkv
from blockkv import __version__
from blockkv.cli.exit_code import MEANINGS, ExitCode, exit_code_of
from blockkv.cli.output import Output
from blockkv.encryption.secret import ENVIRONMENT
from blockkv.errors import BlockKVError

if TYPE_CHECKING:
    from blockkv import Store

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {text}" for code, text in MEANINGS.items())
SIZES = "SIZE is in bytes, or with a binary unit: 4096, 64KiB, 1.5GiB; RATE is a SIZE a second: 200MiB/s."
COMPLETION = """\b
Shell completion:
  bash  eval "$(_BLOCKKV_COMPLETE=bash_source blockkv)"
  zsh   eval "$(_BLOCKKV_COMPLETE=zsh_source blockkv)"
  fish  _BLOCKKV_COMPLETE=fish_source blockkv | source"""


class App(click.Group):
    """The command group. Ends the process itself, in every way a command can end."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "blockkv",
        complete_var: str | None = "_BLOCKKV_COMPLETE",
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command named in `args` and exit with its code."""
        del standalone_mode
        words = list(sys.argv[1:] if args is None else args)
        output = Output(as_json="--json" in words)
        try:
            code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            code = ExitCode.INTERRUPTED
        except click.ClickException as error:
            if output.as_json:
                output.error(error, error.format_message())
            else:
                error.show()
            code = ExitCode.USAGE
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except Exception as error:
            if "--debug" in words:
                raise
            code = exit_code_of(error)
            try:
                output.error(error, _message(error))
            except OSError:  # stdout itself is what failed, a full disk for example
                drop_output()
                Output(as_json=False).error(error, _message(error))
        sys.exit(int(code or 0))


def _message(error: Exception) -> str:
    if isinstance(error, BlockKVError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error} (an internal error; --debug shows where)"


def _unlock(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and not context.resilient_parsing:
        os.environ[ENVIRONMENT] = value
        context.obj = value


def _version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"blockkv {__version__}")
        context.exit()


@click.group(
    cls=App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"{EXIT_CODES}\n\n{COMPLETION}",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
@click.option(
    "--unlock",
    expose_value=False,
    callback=_unlock,
    metavar="SOURCE",
    help="What opens encrypted stores: passphrase, passphrase-file:PATH, key-file:PATH or "
    f"keyring:DESCRIPTION (default: the environment variable {ENVIRONMENT}).",
)
def cli() -> None:
    """KV-cache chunks straight on a raw NVMe namespace.

    STORE is a block device, a partition, an NVMe generic device or a regular file; the members of an array,
    in any order, are separated by commas. Keys are text; write a binary key as hex:<digits>.
    """


def drop_output() -> None:
    """Let go of what cannot be written to stdout: Python would complain about it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command(
    name: str, *, examples: Sequence[str], **settings: Any
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Register a command of `cli`; its function gets an `Output` first, then its parameters.

    `examples` are command lines without their first word.
    """
    return command_of(cli, name, examples=examples, **settings)


def command_of(
    group: click.Group, name: str, *, examples: Sequence[str], **settings: Any
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Like `command`, for a subgroup."""

    def register(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, debug: bool, **parameters: Any) -> int | None:
            del debug  # read from the arguments: it also has to work when parsing fails
            try:
                return function(Output(as_json), **parameters)
            except BrokenPipeError:
                # Whoever read our output has gone, e.g. `| head`.
                drop_output()
                return ExitCode.OK

        debug = click.option("--debug", is_flag=True, help="Show where an error was raised.")
        as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
        made = group.command(name, **settings)(as_json(debug(run)))
        made.epilog = _epilog(made, examples)
        return made

    return register


def _epilog(made: click.Command, examples: Sequence[str]) -> str:
    """What the help of a command ends with."""
    lines = ["\b\nExamples:", *(f"  blockkv {example}" for example in examples)]
    sizes = [SIZES] if any(one.type.name in ("size", "rate") for one in made.params) else []
    return "\n".join(lines) + "\n\n" + "\n\n".join([*sizes, "Exit codes: see `blockkv --help`."])


def open_store(path: StorePath, **options: Any) -> Store:
    """As `blockkv.open`. What --unlock gives is for this store, which has to be an encrypted one then."""
    from blockkv.serving.wire import socket_path

    unlock = None if socket_path(path) is not None else given_unlock()
    return blockkv.open(path, unlock=unlock, **options)


def given_unlock() -> str | None:
    """What --unlock gives, if it is there."""
    given: str | None = click.get_current_context().find_root().obj
    return given


def key_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The KEY argument: text, or hex:<digits> for bytes."""
    return click.argument("key", callback=lambda context, parameter, value: parse_key(value))(function)


def parse_key(text: str) -> str | bytes:
    """A key from the command line. Raises a usage error when hex:<digits> holds something else."""
    if not text.startswith("hex:"):
        return text
    try:
        return bytes.fromhex(text.removeprefix("hex:"))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not hex:<digits>") from None


StorePath = str | list[str]
"""A STORE: a path, or those of the members of an array."""


def store_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The STORE argument. Whether there is a store is for the command to find out."""
    return click.argument(
        "store_path",
        metavar="STORE",
        type=click.Path(readable=False),
        callback=lambda context, parameter, value: parse_store(value),
    )(function)


def parse_store(text: str) -> StorePath:
    """A path, or several that are separated by commas. What exists with its commas is one path."""
    if "," not in text or os.path.exists(text):  # noqa: PTH110
        return text
    return [path for path in text.split(",") if path]


def degraded_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The --degraded option."""
    return click.option(
        "--degraded",
        is_flag=True,
        help="Do without members of an array that are missing: what they hold is a miss, and dropped when "
        "they come back to an array that was written to.",
    )(function)


def device_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """A STORE that is looked at by itself, also where it is a member of an array."""
    return click.argument("store_path", metavar="STORE", type=click.Path(readable=False))(function)
