"""`blockkv doctor`: whether this machine and a device suit, which engine will be used and why."""

from __future__ import annotations

import click

from blockkv.cli.app import StorePath, command, parse_store
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.output import Output

SIGNS = ("ok", "-", "!", "X", "X")
"""By verdict."""
SENTENCES = (
    "good: nothing in the way",
    "good: nothing in the way",
    "works, and could be better",
    "refused: somebody else has it, or something else is on it",
    "cannot be used",
)
EXIT_CODES = (ExitCode.OK, ExitCode.OK, ExitCode.NEGATIVE, ExitCode.REFUSED, ExitCode.DEVICE)


@command(
    "doctor",
    examples=[
        "doctor",
        "doctor /dev/nvme1n1 --fix-hint",
        "doctor /dev/nvme1n1 --udev-rule kv0 >> /etc/udev/rules.d/60-blockkv.rules",
    ],
)
@click.argument("store_path", metavar="[DEVICE]", required=False, type=click.Path(readable=False))
@click.option("--fix-hint", is_flag=True, help="Print the commands that would help; none of them is run.")
@click.option(
    "--udev-rule",
    "rule_name",
    metavar="NAME",
    help="Print the udev rule that makes DEVICE /dev/blockkv/NAME, of group blockkv, and nothing else.",
)
def doctor(output: Output, store_path: str | None, fix_hint: bool, rule_name: str | None) -> int:
    """Say whether this machine suits blockkv, and DEVICE too: several are separated by commas.

    Looks at the kernel and its limits; at who uses the device, its format, cache and health. Nothing is
    written. Ends with 0: good; 1: it works and could be better; 3: it is in use or holds something else;
    4: it cannot be used.
    """
    from blockkv.cli.examine import Observation, Verdict, examine_device, examine_host

    if rule_name is not None:
        return _print_rule(output, store_path, rule_name)
    paths: StorePath = parse_store(store_path) if store_path is not None else []
    found: list[tuple[str | None, Observation]] = [(None, one) for one in examine_host()]
    for path in [paths] if isinstance(paths, str) else paths:
        found += [(path, one) for one in examine_device(path)]
    worst = max((one.verdict for _, one in found), default=Verdict.GOOD)
    document = {
        "verdict": worst.name.lower(),
        "observations": [
            {
                "device": path,
                "topic": one.topic,
                "verdict": one.verdict.name.lower(),
                "found": one.found,
                "fixes": list(one.fixes),
            }
            for path, one in found
        ],
    }

    def text() -> None:
        width = max(len(one.topic) for _, one in found)
        before: str | None = None
        for path, one in found:
            if path != before:
                click.echo(f"\n{path}")
            before = path
            click.echo(f"{SIGNS[one.verdict]:>2}  {one.topic.ljust(width)}  {one.found}")
            if fix_hint:
                for fix in one.fixes:
                    click.echo(f"    {' ' * width}    {fix}")
        click.echo(f"\n{SENTENCES[worst]}")
        if not fix_hint and any(one.fixes for _, one in found):
            click.echo("--fix-hint prints commands that would help")

    output.document(document, text)
    return EXIT_CODES[worst]


def _print_rule(output: Output, path: str | None, name: str) -> int:
    from blockkv.cli.udev_rule import udev_rule
    from blockkv.device.namespace import identify

    if path is None:
        raise click.UsageError("--udev-rule takes the DEVICE that the rule is for")
    rule = udev_rule(identify(path), name)
    output.document({"device": path, "rule": rule}, lambda: click.echo(rule))
    return ExitCode.OK
