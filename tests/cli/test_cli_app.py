"""What all commands share: help, version, errors, exit codes, start-up, completion."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from command_line import answered, blockkv_command, json_answer

import blockkv
from blockkv import errors
from blockkv.cli import cli
from blockkv.cli.exit_code import MEANINGS, ExitCode, exit_code_of
from blockkv.cli.output import Output, key_text

MAIN = [sys.executable, "-c", "from blockkv.cli import main; main()"]


def test_help_names_every_command_and_exit_code() -> None:
    text = answered("--help").out
    for name in ("format", "info", "ls", "put", "get", "rm", "check", "scrub", "inspect", "bench", "demo"):
        assert f"\n  {name} " in text
    for code, meaning in MEANINGS.items():
        assert meaning in text
        assert str(int(code)) in text
    assert "_BLOCKKV_COMPLETE=bash_source" in text
    assert answered("-h").out == text


def leaf_commands() -> list[list[str]]:
    def commands(group: click.Group, words: list[str]) -> list[list[str]]:
        found = []
        for name, item in group.commands.items():
            path = [*words, name]
            found += commands(item, path) if isinstance(item, click.Group) else [path]
        return found

    every = commands(cli, [])
    assert ["inspect", "superblock"] in every
    return every


def test_every_command_has_help_json_and_debug() -> None:
    for words in leaf_commands():
        text = answered(*words, "--help").out
        assert "--json" in text, words
        assert "--debug" in text, words


def test_every_help_ends_with_examples_that_are_accepted() -> None:
    for words in leaf_commands():
        text = answered(*words, "--help").out
        examples = re.findall(r"^ +blockkv (.+)$", text.partition("Examples:")[2], re.MULTILINE)
        assert examples, words
        assert "Exit codes: see `blockkv --help`" in text
        for example in examples:
            arguments = shlex.split(re.split(" [|<>] | >> ", example)[0])
            if arguments[0] == "--unlock":
                del arguments[:2]
            assert arguments[: len(words)] == words
            made: click.Command = cli
            for word in words:
                assert isinstance(made, click.Group)
                made = made.commands[word]
            made.make_context(words[-1], arguments[len(words) :])


def test_every_option_has_a_help_and_every_size_is_explained() -> None:
    for words in leaf_commands():
        made: click.Command = cli
        for word in words:
            assert isinstance(made, click.Group)
            made = made.commands[word]
        options = [one for one in made.params if isinstance(one, click.Option)]
        assert [one.name for one in options if not one.help] == [], words
        takes_sizes = any(one.type.name in ("size", "rate") for one in options)
        assert ("SIZE is in bytes" in answered(*words, "--help").out) == takes_sizes, words


def test_version() -> None:
    assert answered("--version").out.startswith("blockkv 0.")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["ls"], ["ls", "store", "--limit", "x"], ["inspect"]])
def test_usage_errors_end_with_2_and_write_nothing_to_stdout(words: list[str]) -> None:
    answer = answered(*words, code=ExitCode.USAGE)
    assert answer.out == ""
    assert answer.err


def test_usage_errors_as_json() -> None:
    document = json_answer("ls", "store", "--limit", "x", code=ExitCode.USAGE)
    assert document["error"]["type"] == "BadParameter"
    assert "--limit" in document["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.OccupiedError("x"), ExitCode.REFUSED),
        (errors.DeviceBusy("x"), ExitCode.REFUSED),
        (errors.DeviceReadOnly("x"), ExitCode.REFUSED),
        (errors.StoreReadOnly("x"), ExitCode.REFUSED),
        (errors.DeviceError("x"), ExitCode.DEVICE),
        (errors.DeviceLost("x"), ExitCode.DEVICE),
        (errors.DeviceTooSmall("x"), ExitCode.DEVICE),
        (errors.OwnerLost("x"), ExitCode.DEVICE),
        (FileNotFoundError(2, "x", "y"), ExitCode.DEVICE),
        (errors.NotFormatted("x"), ExitCode.FORMAT),
        (errors.VersionTooNew("x"), ExitCode.FORMAT),
        (errors.WrongStore("x"), ExitCode.FORMAT),
        (errors.ArchiveError("x"), ExitCode.FORMAT),
        (errors.StoreFull("x"), ExitCode.FULL),
        (errors.CapacityExceeded("x"), ExitCode.FULL),
        (errors.GrowthEnded("x"), ExitCode.FAILED),
        (errors.InvalidArgument("x"), ExitCode.USAGE),
        (errors.LayoutMismatch("x"), ExitCode.USAGE),
        (errors.StoreClosed("x"), ExitCode.FAILED),
        (errors.BlockKVError("x"), ExitCode.FAILED),
        (errors.BatchError([None], {0: errors.StoreFull("x")}), ExitCode.FULL),
        (ZeroDivisionError("x"), ExitCode.FAILED),
    ],
)
def test_exit_code_of_every_error(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_every_exception_class_has_its_exit_code_tested() -> None:
    """A new exception must be thought of here; the base classes are covered by their subclasses."""
    mark = test_exit_code_of_every_error.pytestmark[0]
    tested = {type(error) for error, _ in mark.args[1]}
    assert {getattr(errors, name) for name in errors.__all__} - tested <= {
        errors.FormatError,
        errors.WrongKey,
    }


def test_an_error_is_one_line_without_a_traceback(image_dir: Path) -> None:
    path = image_dir / "blank.img"
    path.write_bytes(bytes(8 << 20))
    answer = answered("ls", path, code=ExitCode.FORMAT)
    assert answer.out == ""
    assert answer.err.startswith("blockkv: ")
    assert "Traceback" not in answer.err


def test_an_error_as_json_is_the_only_output(image_dir: Path) -> None:
    path = image_dir / "blank.img"
    path.write_bytes(bytes(8 << 20))
    answer = answered("ls", path, "--json", code=ExitCode.FORMAT)
    assert answer.document["error"]["type"] == "NotFormatted"
    assert answer.document["error"]["message"]
    assert answer.err == ""


def test_debug_shows_the_traceback(image_dir: Path) -> None:
    path = image_dir / "blank.img"
    path.write_bytes(bytes(8 << 20))
    with pytest.raises(errors.NotFormatted):
        blockkv_command("ls", path, "--debug")


@pytest.mark.parametrize("command", ["info", "ls", "check", "format"])
def test_a_missing_device_is_a_device_error(tmp_path: Path, command: str) -> None:
    answer = answered(command, tmp_path / "missing", code=ExitCode.DEVICE)
    assert "missing" in answer.err


def test_keys_are_shown_in_a_form_that_reads_back() -> None:
    assert key_text(b"plain") == "plain"
    assert key_text("grüße/1") == "grüße/1"
    assert key_text(b"\xff\x00") == "hex:ff00"
    assert key_text("two\nlines") == "hex:" + b"two\nlines".hex()
    assert key_text("\x1b[31mred") == "hex:" + b"\x1b[31mred".hex()
    assert key_text("hex:00") == "hex:" + b"hex:00".hex()


def test_json_documents_never_hold_raw_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).document({"key": b"\xff", "path": Path("/x")}, lambda: None)
    assert json.loads(capsys.readouterr().out) == {"key": "hex:ff", "path": "/x"}


def test_start_up_needs_neither_torch_nor_rich(store: Path) -> None:
    script = (
        "import sys\n"
        "from blockkv.cli import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "loaded = {'torch', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    for words in (
        ["--help"],
        ["--version"],
        ["info", store],
        ["ls", store],
        ["inspect", "superblock", store],
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_completion_offers_commands() -> None:
    environment = {
        **os.environ,
        "_BLOCKKV_COMPLETE": "bash_complete",
        "COMP_WORDS": "blockkv in",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(MAIN, env=environment, capture_output=True, text=True, check=True)
    assert [line.split(",")[1] for line in done.stdout.splitlines()] == ["info", "inspect"]


def test_a_reader_that_goes_away_is_no_error(store: Path, payload: Path) -> None:
    for number in range(3):
        answered("put", store, f"{number}-{'x' * 4000}", payload)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*MAIN, "ls", str(store)], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b""


def test_ctrl_c_ends_quietly_with_130(store: Path) -> None:
    process = subprocess.Popen(
        [*MAIN, "put", str(store), "key", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    while "pipe_read" not in Path("/proc", str(process.pid), "wchan").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err.strip()) == (ExitCode.INTERRUPTED, b"", b"")


@pytest.mark.parametrize("words", [["ls", "--json"], ["ls"], ["info", "--json"], ["--help"]])
def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path, words: list[str]) -> None:
    store = tmp_path / "store"
    blockkv.format(store, size="16MiB")
    with blockkv.open(store) as opened:
        opened.put("key", b"value")
    command = [*MAIN, *words]
    if words != ["--help"]:
        command.append(str(store))
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == "blockkv: No space left on device\n"
