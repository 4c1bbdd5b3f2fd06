"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings

INSIDE = ("specdec_kernels.", "transformers.", "torch.", "contextlib")


def warn(text: str) -> None:
    """A UserWarning at the code that called this package, however deep the call stands."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"specdec_kernels: {text}", stacklevel=level)
