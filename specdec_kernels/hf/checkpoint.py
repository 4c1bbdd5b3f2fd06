"""Checkpoints of drafters that transformers has no class for: their config and their weights."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def read_config(source: str | os.PathLike) -> dict[str, Any] | None:
    """config.json of a folder or a Hub id, or None when there is none."""
    path = _find(source, "config.json")
    if path is None:
        return None
    try:
        return json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model: expected JSON in {path}, got {error}") from error


def read_weights(source: str | os.PathLike) -> dict[str, Tensor]:
    """All tensors of a folder or a Hub id, on the CPU.

    Raises:
        ValueError: for a file that is missing or damaged, naming it.
    """
    for name in WEIGHT_FILES:
        single, index = _find(source, name), _find(source, f"{name}.index.json")
        if single is not None:
            return _load(single)
        if index is not None:
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            weights: dict[str, Tensor] = {}
            for part in parts:
                path = _find(source, part)
                if path is None:
                    raise ValueError(f"model: expected {part} beside {index}, got no such file")
                weights |= _load(path)
            return weights
    raise ValueError(
        f"model: expected {' or '.join(WEIGHT_FILES)} in {os.fspath(source)!r}, got neither"
    )


def _find(source: str | os.PathLike, name: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        found = cached_file(
            os.fspath(source),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):  # no such repository, or not the name of one
        return None
    return None if found is None else Path(found)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        raise ValueError(f"model: expected readable weights in {path}, got {error}") from error
