"""Property tests here have no time limit per example: on a shared machine any example may stall."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("format", deadline=None)
settings.load_profile("format")
