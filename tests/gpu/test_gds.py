"""The shim round kvikio, which is a stand-in here: when it is used, and which bytes a part is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import blockkv
from blockkv import KVLayout, Part
from blockkv.gpu import choice, choose, gds

LAYOUT = KVLayout.of("layers heads dim", "float16", layers=4, heads=8, dim=5000)


class Future:
    """What `CuFile.pread` gives."""

    def __init__(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes

    def get(self) -> int:
        return self._done_bytes


class CuFile:
    """Reads into host memory, with `shorter_by` bytes missing at the end."""

    shorter_by = 0

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        self._descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> CuFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def pread(self, memory: torch.Tensor, size: int, offset: int) -> Future:
        return Future(os.preadv(self._descriptor, [memory.numpy()[: size - self.shorter_by]], offset))


class Properties:
    """What cuFile says of the system."""

    is_gds_available = True


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A kvikio that says it has GDS, and a kernel that has it too."""
    names = ("kvikio", "kvikio.cufile_driver", "kvikio.defaults")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["kvikio"].CuFile = CuFile
    modules["kvikio.cufile_driver"].properties = Properties()
    modules["kvikio.defaults"].is_compat_mode_preferred = lambda: False
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "stats").write_text("GDS Version: 1.7\n")
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "stats")
    return modules


def test_each_reason_against_it_is_told(
    kvikio: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert gds.refusal() == ""
    kvikio["kvikio.cufile_driver"].properties.is_gds_available = False
    assert "cuFile" in gds.refusal()
    monkeypatch.delattr(kvikio["kvikio.cufile_driver"], "properties")
    assert "does not say" in gds.refusal()
    kvikio["kvikio.defaults"].is_compat_mode_preferred = lambda: True
    assert "compatibility mode" in gds.refusal()
    monkeypatch.setitem(sys.modules, "kvikio.defaults", None)
    assert "pip install blockkv[gpu]" in gds.refusal()
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "nothing")
    assert "nvidia-fs" in gds.refusal()


def test_the_way_and_its_reason(
    kvikio: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choice, "DRIVER_FILES", (tmp_path / "nothing",))
    assert choose().name == "none"
    assert "no NVIDIA driver" in choose().reason
    monkeypatch.setattr(choice, "DRIVER_FILES", (tmp_path,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose().name == "none"
    assert torch.__version__ in choose().reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose().name == "staging"
    assert "verified" in choose().reason
    assert choose(verify=False).name == "gds"
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "nothing")
    assert choose(verify=False).name == "staging"
    assert "nvidia-fs" in choose(verify=False).reason


def test_the_store_says_it(image_dir: Path) -> None:
    blockkv.format(image_dir / "store.img", size="64MiB")
    with blockkv.open(image_dir / "store.img", verify=False) as store:
        way = choose(verify=False)
        assert store.info()["accelerator"] == {"name": way.name, "reason": way.reason}


@pytest.mark.parametrize("part", [Part(), Part(layers=2), Part(heads=range(3, 5)), Part(layers=1, heads=7)])
def test_parts_are_read_from_where_they_lie(kvikio: dict[str, Any], image_dir: Path, part: Part) -> None:
    blockkv.format(image_dir / "store.img", size="64MiB")
    whole = torch.randn(4, 8, 5000).half()
    with blockkv.open(image_dir / "store.img", verify=False) as store:
        store.put("before", torch.zeros(100_000))
        store.put("k", whole, durable=True)
        wanted = store.get("k", part=part, layout=LAYOUT)
        found = torch.zeros_like(wanted)
        assert gds.read_part(store, "k", found, layout=LAYOUT, part=part)
        assert torch.equal(found, wanted)
        assert store.entry("k").pins == 0
        assert not gds.read_part(store, "nothing", found, layout=LAYOUT, part=part)


def test_what_does_not_fit_or_arrive_is_told(
    kvikio: dict[str, Any], image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blockkv.format(image_dir / "store.img", size="64MiB")
    with blockkv.open(image_dir / "store.img", verify=False) as store:
        store.put("k", torch.randn(4, 8, 5000).half())
        store.put("other", torch.randn(4, 8).half())
        with pytest.raises(blockkv.InvalidArgument, match="does not fit"):
            gds.read_part(store, "k", torch.zeros(3), layout=LAYOUT, part=Part(layers=1))
        target = torch.zeros(1, 8, 5000).half()
        with pytest.raises(blockkv.InvalidArgument, match="64 bytes"):
            gds.read_part(store, "other", target, layout=LAYOUT, part=Part(layers=1))
        monkeypatch.setattr(CuFile, "shorter_by", 512)
        with pytest.raises(blockkv.DeviceError, match="of 80000 bytes"):
            gds.read_part(store, "k", target, layout=LAYOUT, part=Part(layers=1))
        assert store.entry("k").pins == store.entry("other").pins == 0
