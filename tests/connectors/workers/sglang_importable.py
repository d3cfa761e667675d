"""Imported before SGLang it makes that importable here.

torchvision, of which nothing is needed, is an empty module; and the hashing of pages that SGLang compiles is
found where `tools/engines` had it compiled.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from transformers.utils import is_torchvision_available

assert not is_torchvision_available()  # remembered: transformers goes on without it
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
    module = types.ModuleType(name)
    module.InterpolationMode = type("InterpolationMode", (), {})
    sys.modules.setdefault(name, module)

os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"  # ninja is there
