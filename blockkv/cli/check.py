"""Commands that look after a store: check, and scrub."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

import blockkv
from blockkv.cli.app import StorePath, command, degraded_option, open_store, store_argument
from blockkv.cli.byte_sizes import Rate, size_text
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.output import Output, key_text


@command("check", examples=["check /dev/nvme1n1 --payload", "check /dev/nvme1n1 --payload --repair --json"])
@store_argument
@degraded_option
@click.option("--payload", is_flag=True, help="Read and verify every chunk, not only the metadata.")
@click.option("--repair", is_flag=True, help="Drop what cannot be verified and write the metadata again.")
def check(output: Output, store_path: StorePath, degraded: bool, payload: bool, repair: bool) -> int:
    """Verify a store: superblock slots, checkpoint, journal, index and free map, with --payload every byte.

    Without --repair nothing is written, so it works on a device that cannot be written to. Every finding is
    one line: what is wrong, where, and what --repair does about it.

    --repair drops only what cannot be verified, names the keys it drops, and writes a new checkpoint and all
    superblock slots. It may be cut short and repeated at any time; a check after it finds nothing.

    Exits 0 when nothing was found, 1 when something was, also when it was repaired. A store in use is refused
    (exit code 3); a live one is read in the background by its `Store.start_scrub`.
    """
    with (
        open_store(store_path, degraded=degraded, read_only=not repair) as store,
        output.progress() as advance,
    ):

        def progress(done_bytes: int, total_bytes: int) -> None:
            advance("checking payload", done_bytes, total_bytes)

        report = store.check(payload=payload, repair=repair, progress=progress)
        left = len(store)
    document = {
        "ok": report.ok,
        "repaired": repair,
        "chunks": left,
        "payload_bytes": report.payload_bytes,
        "payload_checked": report.payload_checked,
        "findings": [_finding_document(finding) for finding in report.findings],
        "damaged_keys": [key_text(key) for key in report.damaged_keys],
    }

    def text() -> None:
        for finding in report.findings:
            click.echo(_finding_line(finding))
        if repair:
            for key in report.damaged_keys:
                click.echo(f"dropped: {key_text(key)}")
        checked = "payload and metadata" if payload else "metadata"
        verdict = "ok" if report.ok else "repaired" if repair else "NOT ok"
        click.echo(f"{verdict}: {left} chunks, {size_text(report.payload_bytes)}; checked {checked}")

    output.document(document, text)
    return ExitCode.OK if report.ok else ExitCode.NEGATIVE


def _finding_document(finding: blockkv.Finding) -> dict[str, Any]:
    document = dataclasses.asdict(finding)
    document["key"] = None if finding.key is None else key_text(finding.key)
    document["remedy"] = finding.remedy.value
    return document


def _finding_line(finding: blockkv.Finding) -> str:
    device = f"{finding.device}: " if finding.device else ""
    key = "" if finding.key is None else f" {key_text(finding.key)}"
    return f"{device}{finding.structure}{key}{finding.where}: {finding.what}; --repair {finding.remedy.value}"


@command("scrub", examples=["scrub /dev/nvme1n1 --rate 200MiB/s"])
@store_argument
@degraded_option
@click.option(
    "--rate",
    "bytes_per_s",
    type=Rate(),
    default="200MiB/s",
    show_default=True,
    help="Read at most this much a second.",
)
def scrub(output: Output, store_path: StorePath, degraded: bool, bytes_per_s: int) -> int:
    """Read and verify every chunk, slowly, and drop those that do not verify.

    Cut short by Ctrl-C, the next scrub goes on where this one was; after a kill or a crash, at most a minute
    before. It is meant to be run regularly, on a store that no process has open. A live one does it in the
    background: `Store.start_scrub`. What is dropped is told on the standard error stream at once.

    Exits 0 when every chunk verified, 1 when some were dropped or could not be read, or metadata was damaged.
    """
    with open_store(store_path, degraded=degraded) as store, output.progress() as advance:

        def progress(done_bytes: int, total_bytes: int) -> None:
            advance("scrubbing", done_bytes, total_bytes)

        # A chunk whose payload did not arrive before a crash was never acknowledged as durable.
        findings = [finding for finding in store.findings if finding.structure != "chunk"]
        report = store.scrub(bytes_per_s, progress=progress)
    ok = report.ok and not findings
    document = {
        "ok": ok,
        "finished": report.finished,
        "resumed": report.resumed,
        "chunks": report.chunks,
        "payload_bytes": report.payload_bytes,
        "damaged_keys": [key_text(key) for key in report.damaged_keys],
        "unread": [{"key": key_text(key), "error": error} for key, error in report.unread],
        "findings": [_finding_document(finding) for finding in findings],
    }

    def text() -> None:
        for finding in findings:
            click.echo(f"{finding}")
        for key in report.damaged_keys:
            click.echo(f"dropped: {key_text(key)}")
        for key, error in report.unread:
            click.echo(f"not read: {key_text(key)}: {error}")
        verdict = "ok" if ok else "NOT ok"
        resumed = ", the rest of a scrub that was cut short" if report.resumed else ""
        click.echo(f"{verdict}: {report.chunks} chunks, {size_text(report.payload_bytes)}{resumed}")

    output.document(document, text)
    return ExitCode.OK if ok else ExitCode.NEGATIVE
