"""Imported before SGLang it makes that importable here, without torchvision, of which nothing is needed."""

from __future__ import annotations

import sys
import types

from transformers.utils import is_torchvision_available

assert not is_torchvision_available()  # remembered: transformers goes on without it
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
    module = types.ModuleType(name)
    module.InterpolationMode = type("InterpolationMode", (), {})
    sys.modules.setdefault(name, module)
