"""The udev rule that gives a device to the group `blockkv`, under a name that stays as it is."""

from __future__ import annotations

import re
from pathlib import Path

from blockkv.device import holders
from blockkv.device.namespace import Identity
from blockkv.errors import InvalidArgument

__all__ = ["GROUP", "RULES", "udev_rule"]

GROUP = "blockkv"
RULES = "/etc/udev/rules.d/60-blockkv.rules"
"""After the rules that give every disk to group `disk`."""


def udev_rule(identity: Identity, name: str) -> str:
    """One line of a rules file: the device of `identity` is /dev/blockkv/`name`, mode 0660, group `blockkv`.

    Raises InvalidArgument for a file, and for a name that is no single word.
    """
    if identity.kind == "file":
        raise InvalidArgument(f"{identity.path} is a file: udev has rules for devices only")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]{0,19}", name):
        raise InvalidArgument(
            f"{name!r} is no name for a device; give up to 20 letters and digits, such as kv0"
        )
    kernel_name = Path(identity.path).name
    directory = holders.SYSFS / "class/block" / kernel_name
    if mapped := holders.read_text(directory / "dm/name"):
        match = f'ENV{{DEVTYPE}}=="disk", ATTR{{dm/name}}=="{mapped}"'
    elif not identity.wwid:
        match = f'KERNEL=="{kernel_name}"'
    elif identity.kind == "partition":
        number = holders.read_text(directory / "partition")
        match = (
            f'ENV{{DEVTYPE}}=="partition", ATTR{{partition}}=="{number}", ATTRS{{wwid}}=="{identity.wwid}"'
        )
    else:
        match = f'ENV{{DEVTYPE}}=="disk", ATTRS{{wwid}}=="{identity.wwid}"'
    return f'SUBSYSTEM=="block", {match}, GROUP="{GROUP}", MODE="0660", SYMLINK+="blockkv/{name}"'
