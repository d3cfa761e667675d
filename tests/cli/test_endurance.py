"""How long a drive lasts: the formulas, and that nothing is made up where a drive does not tell."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from command_line import answered, blockkv_command, json_answer

from blockkv.cli import endurance as endurances
from blockkv.cli import examine
from blockkv.cli.endurance import Endurance, days_left, of_device, of_drive
from blockkv.cli.top import Sample, drives_of, figures, lifetime
from blockkv.device.nvme_admin import Drive, EnduranceGroup, Health, parse_namespace

TERA = 10**12
WORN = Endurance(written_bytes=100 * TERA, used_percent=20, power_on_hours=2400, amplification=1.5)
NEW = Endurance(written_bytes=TERA, used_percent=0, power_on_hours=23, amplification=None)


def drive(used_percent: int, written_bytes: int, hours: int, group: EnduranceGroup | None = None) -> Drive:
    identify = bytearray(4096)
    identify[130] = 12
    health = Health(0, 40, 100, 10, used_percent, 0, written_bytes, hours, 0, 0)
    return Drive(
        "model", "serial", "1", False, 1, False, False, parse_namespace(bytes(identify)), health, group
    )


def test_what_is_left_at_a_rate() -> None:
    """100 TB took 20 % in 100 days: 500 TB in all, 400 are left, at 1 TB a day 400 days."""
    assert WORN.bytes_per_day == TERA
    assert WORN.life_bytes == 500 * TERA
    assert days_left(WORN, WORN.bytes_per_day, WORN.life_bytes) == 400
    assert days_left(WORN, 4 * TERA, WORN.life_bytes) == 100
    assert days_left(WORN, 4 * TERA, 600 * TERA) == 125, "a rating of 600 TBW"


def test_what_is_over_has_no_days_left() -> None:
    assert days_left(WORN, TERA, 90 * TERA) == 0
    spent = dataclasses.replace(WORN, used_percent=120)
    assert days_left(spent, TERA, spent.life_bytes) == 0


def test_what_is_not_known_is_not_made_up() -> None:
    assert NEW.bytes_per_day is None, "less than a day"
    assert NEW.life_bytes is None, "less than 1 %"
    assert days_left(NEW, TERA, NEW.life_bytes) is None
    assert days_left(WORN, None, WORN.life_bytes) is None
    assert days_left(WORN, 0.0, WORN.life_bytes) is None
    assert of_drive(dataclasses.replace(drive(1, 1, 1), health=None)) is None


def test_the_drive_s_own_amplification_is_that_of_its_endurance_group() -> None:
    assert of_drive(drive(20, 100 * TERA, 2400, EnduranceGroup(100 * TERA, 150 * TERA))) == WORN
    for group in (None, EnduranceGroup(0, 0), EnduranceGroup(TERA, 0), EnduranceGroup(0, TERA)):
        found = of_drive(drive(20, TERA, 1, group))
        assert found is not None
        assert found.amplification is None


def test_what_doctor_says() -> None:
    (told,) = examine._endurance(drive(20, 100 * TERA, 2400, EnduranceGroup(100 * TERA, 150 * TERA)))
    assert told.found == (
        "2400 hours on, 1,000 GB a day on the mean; its media: 1.50 bytes for each of these; "
        "life left: 400 days at that rate"
    )
    (told,) = examine._endurance(drive(0, TERA, 2400))
    assert told.found.endswith("its media: not told; life left: unknown, less than 1 % is used")
    (told,) = examine._endurance(drive(20, 0, 1))
    assert told.found.endswith("mean of a day unknown; its media: not told; life left: unknown")


def of_an_hour(numbers: dict[str, float]) -> dict[str, Any]:
    return figures(Sample(0.0), Sample(3600.0, numbers))


def test_what_top_says() -> None:
    numbers = {"put_bytes": TERA, "device_write_bytes": 1.25 * TERA}
    figure = of_an_hour(numbers)
    assert figure["written_tb_per_day"] == 30
    assert lifetime(figure, numbers, WORN, 700) == {
        "written_bytes": 1_250_000_000_000,
        "amplification": 1.25,
        "drive_written_bytes": 100 * TERA,
        "drive_amplification": 1.5,
        "used_percent": 20,
        "days_left": pytest.approx(400 / 30),
        "days_to_rated": 20,
    }
    unknown = lifetime(figure, numbers | {"clients_accepted": 1}, None, 700)
    assert [name for name, value in unknown.items() if value is not None] == ["written_bytes"]
    assert lifetime(of_an_hour({}), {}, WORN, None)["days_left"] is None


def test_a_drive_of_another_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockkv.cli.top.of_device", lambda path: (WORN, ""))
    assert drives_of("http://127.0.0.1:9105/metrics", ["/dev/nvme0n1"]) == {"/dev/nvme0n1": WORN}
    assert drives_of("http://storage-7:9105/metrics", ["/dev/nvme0n1"]) == {"/dev/nvme0n1": None}


def test_info_tells_it_of_every_device(store: Path, image_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json_answer("info", store)["endurance"] == {"unknown": "it is not on an NVMe drive"}
    assert of_device(str(image_dir / "none"))[0] is None
    monkeypatch.setattr(endurances, "of_device", lambda path: (NEW, ""))
    shown = answered("info", store).out
    assert shown.count(" unknown\n") == 3, "mean rate, amplification, days"
    members = [image_dir / "a.img", image_dir / "b.img"]
    joined = ",".join(map(str, members))
    blockkv_command("format", joined, "--size", "64MiB")
    monkeypatch.setattr(endurances, "of_device", lambda path: (WORN, ""))
    for member in json_answer("info", joined)["members"]:
        assert member["endurance"] == {
            "drive_written_bytes": 100 * TERA,
            "drive_written_bytes_per_day": TERA,
            "drive_amplification": 1.5,
            "used_percent": 20,
            "power_on_hours": 2400,
            "days_left": 400,
        }
