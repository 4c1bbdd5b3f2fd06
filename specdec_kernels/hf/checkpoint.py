"""Checkpoints of drafters that transformers has no class for: their config and their weights."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
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


def read_weights(source: str | os.PathLike) -> dict[str, Tensor]:
    """All tensors of a folder or a Hub id, on the CPU.

    Raises:
        ValueError: for a file that is missing or damaged, naming it.
    """
    weights: dict[str, Tensor] = {}
    files = _weight_files(source)
    if not files:
        raise ValueError(
            f"model: expected {' or '.join(WEIGHT_FILES)} in {os.fspath(source)!r}, got neither"
        )
    for path in files:
        with _readable(path):
            if path.suffix == ".safetensors":
                weights |= load_file(path)
            else:
                weights |= torch.load(path, "cpu", weights_only=True)
    return weights


def read_checkpoint(source: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the weights by their own names; raises ValueError where one is missing."""
    config = read_config(source)
    if config is None:
        raise ValueError(f"model: expected config.json in {os.fspath(source)!r}, got none")
    return config, read_weights(source)


def fill(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    borrowed: Mapping[str, nn.Parameter],
    target: PreTrainedModel,
    kind: str,
) -> None:
    """Gives `network` its parameters, in the target's dtype: borrowed ones as they are.

    Raises ValueError for weights that are missing, unknown, of another shape or NaN; `kind` says
    there what the network is.
    """
    expected = dict(network.named_parameters())
    missing = sorted(expected.keys() - weights.keys() - borrowed.keys())
    if missing:
        raise ValueError(
            f"model: expected {', '.join(missing)} in the weights, got none; of the target's only "
            "tables of the same shape can stand in"
        )
    unknown = sorted(weights.keys() - expected.keys())
    if unknown:
        raise ValueError(
            f"model: expected no weights but those of {kind}, got {', '.join(unknown)}"
        )
    for name, parameter in expected.items():
        owner = network.get_submodule(name.rpartition(".")[0])
        value = borrowed.get(name)
        if value is None:
            tensor = weights[name]
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"model: expected {name} of shape {list(parameter.shape)} for this target and "
                    f"config.json, got {list(tensor.shape)}"
                )
            if bool(tensor.isnan().any()):
                raise ValueError(f"model: expected weights without NaN, got some in {name}")
            value = nn.Parameter(tensor.to(target.device, target.dtype), requires_grad=False)
        setattr(owner, name.rpartition(".")[2], value)


def _weight_files(source: str | os.PathLike) -> list[Path]:
    for name in WEIGHT_FILES:
        single, index = _find(source, name), _find(source, f"{name}.index.json")
        if single is not None:
            return [single]
        if index is not None:
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            found = [_find(source, part) for part in parts]
            if None in found:
                lost = parts[found.index(None)]
                raise ValueError(f"model: expected {lost} beside {index}, got no such file")
            return [path for path in found if path is not None]
    return []


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
