"""Speculative decoding kernels that make Hugging Face `generate` faster, with the same output.

import specdec_kernels as sdk
sdk.patch(model)          # every model.generate(...) now drafts and verifies
sdk.unpatch(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import specdec_kernels.metrics  # noqa: F401
from specdec_kernels import ops
from specdec_kernels.config import SpeculativeConfig

if TYPE_CHECKING:
    from specdec_kernels.hf.patch import (
        metrics,
        patch,
        patched,
        save_profile,
        suffix_cache,
        unpatch,
    )
    from specdec_kernels.hf.support import support

__version__ = "0.1.0"
__all__ = [
    "SpeculativeConfig",
    "metrics",
    "ops",
    "patch",
    "patched",
    "save_profile",
    "suffix_cache",
    "support",
    "unpatch",
]

# Importing a submodule binds its name here; `metrics` is to be the function.
del globals()["metrics"]

_FROM_HF = frozenset(
    {"metrics", "patch", "patched", "save_profile", "suffix_cache", "support", "unpatch"}
)


def __getattr__(name: str) -> Any:
    """The drop-in needs transformers, which is imported when it is first used."""
    if name not in _FROM_HF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from specdec_kernels import hf
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            f"specdec_kernels.{name} needs transformers: pip install 'specdec-kernels[hf]'"
        ) from error
    return getattr(hf, name)
