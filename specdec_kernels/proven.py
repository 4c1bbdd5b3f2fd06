"""Which GPU paths have passed their suite on which device: only those are chosen by themselves.

`python -m bench --device cuda --suite` records them in a small file in the user's cache folder. A
record counts for the very kernels, versions and device that it was made with, and no others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch

from specdec_kernels import native

PATHS = ("cuda", "cuda-hopper", "triton")
FORMAT = 1

Records = dict[str, dict[str, list[str]]]  # identity of a path on a device: op: paths

_tried: dict[str, bool] = {}


def file() -> Path:
    """Where the records are: under XDG_CACHE_HOME, or ~/.cache without one."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specdec_kernels" / "proven.json"


@functools.cache
def is_proven(op: str, path: str, device: torch.device) -> bool:
    """Whether `path` of `op` has passed on this device. Asked once per process, then remembered."""
    if path in _tried:
        return _tried[path]
    name = identity(path, device) if device.type == "cuda" else None
    return name is not None and path in _read().get(name, {}).get(op, [])


@contextlib.contextmanager
def trying(path: str, wanted: bool = True) -> Iterator[None]:
    """Inside, `path` counts as proven for all ops, or not: how the suite reaches it."""
    _tried[path] = wanted
    is_proven.cache_clear()
    try:
        yield
    finally:
        del _tried[path]
        is_proven.cache_clear()


def record(results: dict[tuple[str, str], bool], device: torch.device) -> None:
    """Keeps which (op, path) passed; one that failed is forgotten if it passed before.

    Raises:
        OSError: when the file cannot be written.
    """
    records = _read()
    for (op, path), passed in results.items():
        name = identity(path, device)
        if name is None:
            continue
        paths = records.setdefault(name, {}).setdefault(op, [])
        paths[:] = sorted({*paths, path} if passed else {*paths} - {path})
    _write(records)


def proven_on(device: torch.device) -> dict[str, list[str]]:
    """Maps op to the paths that have passed on this device, as the file has them now."""
    records = _read()
    found: dict[str, list[str]] = {}
    for path in PATHS:
        name = identity(path, device)
        for op, paths in records.get(name, {}).items() if name is not None else ():
            if path in paths:
                found.setdefault(op, []).append(path)
    return dict(sorted(found.items()))


def identity(path: str, device: torch.device) -> str | None:
    """All that a record depends on; None where the path does not exist."""
    if path not in PATHS:
        raise ValueError(f"proven: expected one of {', '.join(PATHS)}, got {path!r}")
    if native.triton_error if path == "triton" else native.cuda_error:
        return None
    from specdec_kernels import __version__

    versions = [f"specdec-kernels {__version__}", f"torch {torch.__version__}"]
    if path == "triton":
        versions += [f"triton {importlib.metadata.version('triton')}"]
        sources = sorted((Path(__file__).parent / "ops").rglob("*.py"))
    else:
        sources = [Path(native.cuda.__file__)]
    versions.append(_hash(tuple(sources)))
    return ", ".join([torch.cuda.get_device_name(device), *versions])


@functools.lru_cache(maxsize=4)
def _hash(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read() -> Records:
    """What the file says; nothing where it cannot be read or was not written by us."""
    try:
        content = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}
    records = content.get("proven")
    return records if _is_records(records) else {}


def _is_records(value: Any) -> TypeGuard[Records]:
    return isinstance(value, dict) and all(
        isinstance(ops, dict) and all(isinstance(paths, list) for paths in ops.values())
        for ops in value.values()
    )


def _write(records: Records) -> None:
    """At once, so that another process reads the old or the new file and nothing between."""
    target = file()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, delete=False
    ) as temporary:
        json.dump({"format": FORMAT, "proven": records}, temporary, indent=1)
    os.replace(temporary.name, target)
