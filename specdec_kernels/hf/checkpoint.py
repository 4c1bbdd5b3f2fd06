"""Checkpoints of drafters that transformers has no class for: their config and their weights."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def has_file(source: str | os.PathLike, name: str) -> bool:
    """Whether a folder or a Hub id has it."""
    return _find(source, name) is not None


def read_config(source: str | os.PathLike) -> dict[str, Any] | None:
    """config.json of a folder or a Hub id, or None when there is none."""
    path = _find(source, "config.json")
    if path is None:
        return None
    try:
        return json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model: expected JSON in {path}, got {error}") from error


def weight_names(source: str | os.PathLike) -> set[str]:
    """Names of the tensors of a folder or a Hub id, which are not read; none where none lie."""
    for name in WEIGHT_FILES:
        index = None if _find(source, name) else _find(source, f"{name}.index.json")
        if index is not None:
            return set(_weight_map(index))
    names: set[str] = set()
    for path in _weight_files(source):
        if path.suffix == ".safetensors":
            with _readable(path), safe_open(path, "pt") as file:
                names |= set(file.keys())
        else:
            with _readable(path):
                mapped = zipfile.is_zipfile(path)  # what old versions of torch wrote is none
                names |= torch.load(path, "cpu", weights_only=True, mmap=mapped).keys()
    return names


def read_weights(
    source: str | os.PathLike, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The wanted tensors of a folder or a Hub id, on the CPU; no other file is looked for.

    Raises:
        ValueError: for a file that is missing or damaged, naming it.
    """
    weights: dict[str, Tensor] = {}
    files = _weight_files(source, wanted)
    if not files:
        raise ValueError(
            f"model: expected {' or '.join(WEIGHT_FILES)} in {os.fspath(source)!r}, got neither"
        )
    for path in files:
        with _readable(path):
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118
                    weights |= {name: file.get_tensor(name) for name in names}
            else:
                found = torch.load(path, "cpu", weights_only=True)
                weights |= {k: tensor for k, tensor in found.items() if wanted(k)}
    return weights


def read_checkpoint(source: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the weights by their own names; raises ValueError where one is missing."""
    config = read_config(source)
    if config is None:
        raise ValueError(f"model: expected config.json in {os.fspath(source)!r}, got none")
    return config, read_weights(source)


def _weight_files(
    source: str | os.PathLike, wanted: Callable[[str], bool] = lambda name: True
) -> list[Path]:
    for name in WEIGHT_FILES:
        single, index = _find(source, name), _find(source, f"{name}.index.json")
        if single is not None:
            return [single]
        if index is not None:
            parts = sorted({part for k, part in _weight_map(index).items() if wanted(k)})
            found = [_find(source, part) for part in parts]
            if None in found:
                lost = parts[found.index(None)]
                raise ValueError(f"model: expected {lost} beside {index}, got no such file")
            return [path for path in found if path is not None]
    return []


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor."""
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"model: expected a weight_map in {index}, got {error!r}") from error


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


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        raise ValueError(f"model: expected readable weights in {path}, got {error}") from error
