"""bench: small runs beside a real fio, on a loop device."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import answered, json_answer

from blockkv.cli.exit_code import ExitCode

QUICK = ("--pairs", 1, "--seconds", 0.05, "--batch", "1MiB", "--chunk", "512KiB", "--chunk", "1MiB")


@pytest.mark.requires_root
@pytest.mark.requires_tool("fio")
def test_bench_beside_fio(loop_device) -> None:
    device = loop_device(64 << 20, 4096)
    document = json_answer("bench", device, *QUICK)
    assert document["device"] == str(device)
    assert [(case["op"], case["chunk_bytes"], case["chunks_per_call"]) for case in document["cases"]] == [
        ("get", 512 << 10, 2),
        ("get", 1 << 20, 1),
        ("put", 512 << 10, 2),
        ("put", 1 << 20, 1),
    ]
    for case in document["cases"]:
        assert case["gb_per_s"] > 0
        assert case["fio_gb_per_s"] > 0
        assert case["cpu_s_per_gb"] > 0
        assert case["ratio"] == pytest.approx(case["gb_per_s"] / case["fio_gb_per_s"], rel=1e-6)
        assert case["ratio_spread"] == [case["ratio"]] * 2
        assert case["verify"] is True
    shapes = [(item["op"], item["request_bytes"], item["depth"]) for item in document["fio"]]
    assert shapes == [
        (op, request_bytes, depth)
        for op in ("get", "put")
        for request_bytes, depth in ((128 << 10, 32), (512 << 10, 16), (1 << 20, 8))
    ]
    document = json_answer("bench", device, *QUICK, "--force", "--no-verify", "--memory", "ordinary")
    assert [(case["op"], case["verify"], case["memory"]) for case in document["cases"]] == [
        *[("get", False, "ordinary")] * 2,
        *[("put", True, "ordinary")] * 2,
    ]
    text = answered("bench", device, *QUICK, "--op", "put", "--force").out
    assert "128 KiB x 32" in text
    assert "512 KiB x 2" in text


def test_bench_refuses_what_format_refuses(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    assert json_answer("bench", store, *QUICK, code=ExitCode.REFUSED)["error"]["type"] == "OccupiedError"
    assert json_answer("check", store, "--payload")["chunks"] == 1


def test_bench_needs_room(image_dir: Path) -> None:
    path = image_dir / "small.img"
    path.write_bytes(bytes(16 << 20))
    assert "data zone" in answered("bench", path, "--batch", "8MiB", code=ExitCode.USAGE).err
