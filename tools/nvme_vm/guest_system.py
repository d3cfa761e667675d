"""What the virtual machine boots: QEMU, Debian's cloud kernel and an initramfs, fetched once and kept.

Packages are installed with apt. Two things are only unpacked, into a cache outside the checkout: the kernel,
which would touch this machine's boot loader, and a later QEMU from Debian's backports, which emulates FDP.
What that links with comes with the installed one, and so does virtiofsd, which it has no longer. The kernel's
NVMe driver is built in; the modules in the initramfs mount the host's root.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GuestSystem", "SetupError", "prepare"]

INIT = Path(__file__).with_name("init")
KERNEL_METAPACKAGE = "linux-image-cloud-amd64"
MODULES = ("virtio_pci", "virtiofs", "overlay")
QEMU_PACKAGES = ("qemu-system-x86", "qemu-system-data")
BACKPORTS = "bookworm-backports"
FIRMWARE = Path("/usr/share/seabios")
QEMU = "qemu-system-x86_64"
VIRTIOFSD = Path("/usr/lib/qemu/virtiofsd")
PACKAGE_OF = {
    QEMU: "qemu-system-x86",
    str(VIRTIOFSD): "qemu-system-common",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
}
SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"

Say = Callable[[str], None]


class SetupError(Exception):
    """The virtual machine cannot be set up here; the message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class GuestSystem:
    qemu: tuple[str, ...]
    """The command, and where its firmware is."""
    kernel: Path
    modules: Path
    """The directory of the kernel's modules; the guest sees it as its own."""
    initramfs: Path


def prepare(say: Say = lambda _: None) -> GuestSystem:
    """Install and unpack what is missing. Takes a fraction of a second when nothing is.

    Raises SetupError.
    """
    if platform.machine() != "x86_64":
        raise SetupError(f"this is {platform.machine()}; the virtual machine needs an x86-64 host")
    if os.geteuid() != 0:
        raise SetupError("needs root: virtiofsd shares this machine's root directory; run it with sudo")
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        install_packages(say)
        kernel_directory = find_kernel(cache) or fetch_kernel(cache, say)
        (modules,) = (kernel_directory / "lib/modules").iterdir()
        (kernel,) = (kernel_directory / "boot").glob("vmlinuz-*")
        qemu_directory = find_qemu(cache) or fetch_qemu(cache, say)
        qemu = (
            str(qemu_directory / "usr/bin" / QEMU),
            *("-L", str(qemu_directory / "usr/share/qemu"), "-L", str(FIRMWARE)),
        )
        initramfs = initramfs_for(cache, kernel_directory, modules.name, say)
        return GuestSystem(qemu, kernel, modules, initramfs)


def cache_directory() -> Path:
    default = Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "blockkv-nvme-vm"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time prepares."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install_packages(say: Say) -> None:
    if not (missing := missing_packages()):
        return
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    if shutil.which("apt-get") is None:
        raise SetupError(f"missing packages, under Debian's names: {' '.join(missing)}; install them")
    say(f"installing {' '.join(missing)}")
    run(["apt-get", "update", "-qq"])
    run(command)
    if missing := missing_packages():
        raise SetupError(f"still missing after installing: {' '.join(missing)}; Debian 12 has them")


def missing_packages() -> list[str]:
    return sorted(
        {package for name, package in PACKAGE_OF.items() if shutil.which(name, path=SEARCH_PATH) is None}
    )


def find_kernel(cache: Path) -> Path | None:
    return max(cache.glob("linux-image-*"), default=None)


def fetch_kernel(cache: Path, say: Say) -> Path:
    """Download the current kernel package and unpack it; appears under its name when it is complete."""
    if not (dependencies := output(["apt-cache", "depends", KERNEL_METAPACKAGE])):
        run(["apt-get", "update", "-qq"])
        dependencies = output(["apt-cache", "depends", KERNEL_METAPACKAGE])
    names = [word for word in dependencies.split() if word.startswith("linux-image-") and word[12].isdigit()]
    if not names:
        raise SetupError(f"apt knows no {KERNEL_METAPACKAGE}; the guest needs a Debian package source")
    say(f"downloading {names[0]}")
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpack.") as name:
        directory = Path(name)
        # without a sandbox user, which could not write here
        run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", names[0]], directory)
        (package,) = directory.glob("*.deb")
        kernel = directory / "kernel"
        run(["dpkg", "-x", str(package), str(kernel)])
        (modules,) = (kernel / "lib/modules").iterdir()
        run(["depmod", "-b", str(kernel), modules.name])
        return kernel.rename(cache / names[0])


def find_qemu(cache: Path) -> Path | None:
    return max(cache.glob("qemu-*"), default=None)


def fetch_qemu(cache: Path, say: Say) -> Path:
    """Download QEMU from the backports and unpack it, with package lists apart from apt's."""
    say(f"downloading QEMU from {BACKPORTS}")
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpack.") as name:
        directory = Path(name)
        (directory / "lists/partial").mkdir(parents=True)
        (directory / "sources").write_text(f"deb {debian_mirror()} {BACKPORTS} main\n")
        apt = ["apt-get", "-qq"]
        for option in (
            f"Dir::Etc::sourcelist={directory}/sources",
            "Dir::Etc::sourceparts=-",
            f"Dir::State::lists={directory}/lists",
            "Dir::Cache::pkgcache=",
            "Dir::Cache::srcpkgcache=",
            "APT::Sandbox::User=root",
            "Acquire::Languages=none",
            "Acquire::Retries=3",
        ):
            apt += ["-o", option]
        run([*apt, "update"])
        run([*apt, "download", *QEMU_PACKAGES], directory)
        qemu = directory / "qemu"
        packages = [next(directory.glob(f"{package}_*.deb"), None) for package in QEMU_PACKAGES]
        for package, file in zip(QEMU_PACKAGES, packages, strict=True):
            if file is None:
                raise SetupError(f"{BACKPORTS} has no {package}; the guest's drives need QEMU 8 or later")
            run(["dpkg", "-x", str(file), str(qemu)])
        version = output([str(qemu / "usr/bin" / QEMU), "--version"]).split("version ", 1)[-1].split(" ")[0]
        if not version:
            raise SetupError(f"QEMU from {BACKPORTS} does not start; is this Debian 12?")
        return qemu.rename(cache / f"qemu-{version}")


def debian_mirror() -> str:
    """Where this machine gets its Debian packages."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    if not (found := output(command)):  # it names what has been fetched
        run(["apt-get", "update", "-qq"])
        found = output(command)
    release = BACKPORTS.partition("-")[0]
    for line in found.splitlines():
        if line.startswith(f"{release} "):
            return line.split()[1]
    raise SetupError(f"apt knows no source of Debian packages for {release}; the guest needs one")


def initramfs_for(cache: Path, kernel_directory: Path, release: str, say: Say) -> Path:
    """Busybox, `init` and the modules it needs. Named after its content."""
    busybox = Path(shutil.which("busybox") or "")
    if "=>" in output(["ldd", str(busybox)]):
        raise SetupError(f"{busybox} needs shared libraries; install busybox-static")
    content = hashlib.sha256(INIT.read_bytes() + busybox.read_bytes() + str(kernel_directory).encode())
    target = cache / f"initramfs-{content.hexdigest()[:16]}"
    if target.exists():
        return target
    say("building the initramfs")
    with tempfile.TemporaryDirectory(dir=cache, prefix="initramfs.") as name:
        root = Path(name) / "root"
        for directory in ("bin", "dev", "proc", "sys", "host", "memory", "modules", "newroot"):
            (root / directory).mkdir(parents=True)
        shutil.copy(busybox, root / "bin/busybox")
        shutil.copy(INIT, root / "init")
        (root / "init").chmod(0o755)
        order = []
        for module in module_files(kernel_directory, release):
            shutil.copy(module, root / "modules")
            order.append(module.name)
        (root / "modules/order").write_text("".join(f"{name}\n" for name in order))
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        archive = subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet"],
            cwd=root,
            input=names.encode(),
            capture_output=True,
            check=True,
        ).stdout
        complete = Path(name) / "initramfs"
        complete.write_bytes(gzip.compress(archive, 1))
        return complete.rename(target)


def module_files(kernel_directory: Path, release: str) -> list[Path]:
    """`MODULES` and what they depend on, in the order in which the kernel takes them."""
    found: list[Path] = []
    for module in MODULES:
        command = ["modprobe", "-d", str(kernel_directory), "-S", release, "--show-depends", module]
        for line in output(command).splitlines():
            verb, _, path = line.strip().partition(" ")
            if verb == "insmod" and Path(path) not in found:
                found.append(Path(path))
    return found


def run(command: list[str], directory: Path | None = None) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": SEARCH_PATH}
    done = subprocess.run(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SetupError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


def output(command: list[str]) -> str:
    environment = os.environ | {"PATH": SEARCH_PATH}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
