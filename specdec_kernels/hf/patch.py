"""patch, unpatch, patched, metrics, save_profile, suffix_cache: our loop in a model's `generate`.

generate() looks its decoding methods up on the class, so GenerationMixin's are wrapped once, while
any model is patched; a weak table says which models are ours. Nothing is stored on a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from specdec_kernels import notices
from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.config_checks import BY_MODEL
from specdec_kernels.cpu import cpu_info, isa_in_use
from specdec_kernels.decoding import profile
from specdec_kernels.decoding.controller import AcceptanceModel, CostModel
from specdec_kernels.drafting.factory import make_suffix_cache
from specdec_kernels.drafting.suffix_cache import SuffixCache
from specdec_kernels.drafting.synthetic import Recorded
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.dflash import DFlash, load_dflash
from specdec_kernels.hf.draft import Draft, load_draft
from specdec_kernels.hf.eagle import Eagle, head_method, load_eagle
from specdec_kernels.hf.medusa import MedusaHeads, load_heads
from specdec_kernels.hf.model import Runner
from specdec_kernels.hf.mtp import Mtp, load_mtp
from specdec_kernels.hf.penalties import with_penalties
from specdec_kernels.hf.support import support, unwrap
from specdec_kernels.hf.translation import Wanted
from specdec_kernels.metrics import Metrics

METHODS = ("_sample", "_beam_search", "_assisted_decoding")


Drafting = Draft | Eagle | Mtp | MedusaHeads | DFlash


class Engine:
    """What we keep about a patched model, outside of it."""

    def __init__(self, model: PreTrainedModel, config: SpeculativeConfig):
        method = head_method(config.model, model) if "draft_model" in config.methods else None
        if method is not None:
            combined = config.method.replace("draft_model", method)
            config = dataclasses.replace(config, method=combined)
        self.config = config
        self.metrics = Metrics()
        self.costs = CostModel()
        self.acceptance = AcceptanceModel()
        vocab = getattr(model.config.get_text_config(), "vocab_size", 0)
        self.suffix_cache = make_suffix_cache(config, vocab)
        self.recorded = Recorded()
        self.unsupported = support(model).reason
        self.proven = False
        self.warned: set[str] = set()
        self.runner: Runner | None = None
        if not self.unsupported:
            self.runner = Runner(model, config.linear, config.graphs, config.compile)
        self.draft: Drafting | None = None
        if not self.unsupported and any(method in BY_MODEL for method in config.methods):
            self.draft = _load(config, model)
        if config.profile is not None and not self.unsupported:
            profile.load(config.profile, profile_key(model, config.method), self.learnt())

    def learnt(self) -> profile.Learnt:
        """What the controllers of all runs share."""
        draft_cost = None if self.draft is None else self.draft.cost
        return profile.Learnt(self.costs, self.acceptance, draft_cost)

    def warn_plain(self, reason: str) -> None:
        """Says once per reason that a call runs plain."""
        self.warn(f"plain decoding: {reason}")

    def warn(self, text: str) -> None:
        """Says it once."""
        if text not in self.warned:
            self.warned.add(text)
            notices.warn(text)


def profile_key(model: PreTrainedModel, method: str) -> dict[str, Any]:
    """What a profile belongs to: other weights, devices, types or methods have other costs."""
    text = model.config.get_text_config()
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    else:
        device = f"{cpu_info()[0]}, {isa_in_use()}, {torch.get_num_threads()} threads"
    return {
        "model": [text.model_type, model.config.name_or_path, model.num_parameters()],
        "device": device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "method": method,
    }


def _load(config: SpeculativeConfig, target: PreTrainedModel) -> Drafting:
    if isinstance(config.model, (Eagle, Mtp, MedusaHeads, DFlash)):
        return config.model
    method = next(method for method in config.methods if method in BY_MODEL)
    if method == "draft_model":
        chains = config.children_in_draft == 1 and config.draft_sample_method == "greedy"
        tokenizers = config.tokenizer, config.draft_tokenizer
        wanted = Wanted(config.draft_translation, chains, *tokenizers)
        return load_draft(config.model, target, config.linear, wanted)
    if method == "medusa":
        choices = config.medusa_choices
        assert not isinstance(choices, str)  # a name has become its paths
        limits = config.draft_tree_depth, choices
        return load_heads(config.model, target, config.linear, *limits)
    if method in ("dflash", "dspark"):
        return load_dflash(config.model, method, target, config.linear)
    if method == "mtp":
        return load_mtp(config.model, target, config.linear)
    return load_eagle(config.model, method, target, config.linear)


_engines: weakref.WeakKeyDictionary[PreTrainedModel, Engine] = weakref.WeakKeyDictionary()
_originals: dict[str, Callable] = {}
_lock = threading.RLock()


def patch(
    model: Any, /, config: SpeculativeConfig | Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Makes `model.generate` draft and verify; returns the model. Patching again replaces settings.

    Args:
        model: a transformers causal language model, or a PEFT wrapper around one.
        config: SpeculativeConfig, a dictionary with its keys, or None for the defaults.
        options: single settings, which win over `config`.

    Raises:
        ValueError, TypeError: for an unknown option, a value out of range or a draft model that
            does not fit.
        ImportError: for method "suffix" without the compiled kernels.
        The model is then as it was. One that cannot be accelerated is not an error: it warns and
        runs plain.
    """
    settings = SpeculativeConfig.make(config, **options)
    target = _target(model)
    engine = Engine(target, settings)
    with _lock:
        _install()
        _engines[target] = engine
    if engine.unsupported:
        engine.warn_plain(engine.unsupported)
    return model


def unpatch(model: Any) -> Any:
    """Undoes `patch`; a model that is not patched is left alone. Returns the model."""
    with _lock:
        _engines.pop(_target(model), None)
        _uninstall_if_unused()
    return model


@contextlib.contextmanager
def patched(
    model: Any, /, config: SpeculativeConfig | Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """`patch` for the time of a with block; afterwards the model is as it was before."""
    target = _target(model)
    previous = _engines.get(target)
    patch(model, config, **options)
    try:
        yield model
    finally:
        with _lock:
            if previous is not None:
                _engines[target] = previous
            else:
                unpatch(model)


def metrics(model: Any) -> Metrics:
    """The counts of a patched model since it was patched or the metrics were reset."""
    return _engine("metrics", model).metrics


def save_profile(model: Any, path: str | os.PathLike[str]) -> None:
    """Keeps what the adaptive choice has learnt about a patched model on this device, for
    `patch(model, profile=path)` in a later process. A file may hold several models and devices.

    Raises ValueError for a model that is not patched and for a file that is no profile.
    """
    engine = _engine("save_profile", model)
    profile.save(path, profile_key(_target(model), engine.config.method), engine.learnt())


def suffix_cache(model: Any) -> SuffixCache:
    """The outputs that a model patched with method "suffix" keeps for drafts of later calls.

    It offers len(), clear(), save(path) and load(path), and is empty after each `patch`.
    """
    cache = _engine("suffix_cache", model).suffix_cache
    if cache is None:
        raise ValueError(
            "suffix_cache: expected a model patched with method 'suffix' and "
            "suffix_decoding_max_cached_requests of at least 1"
        )
    return cache


def _engine(caller: str, model: Any) -> Engine:
    engine = _engines.get(_target(model))
    if engine is None:
        raise ValueError(
            f"{caller}: expected a patched model; call specdec_kernels.patch(model) first"
        )
    return engine


def _target(model: Any) -> PreTrainedModel:
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch: expected a transformers model, got {type(model).__name__}")
    return model


def _install() -> None:
    if not _originals:
        for name in METHODS:
            _originals[name] = GenerationMixin.__dict__[name]
            setattr(GenerationMixin, name, _dispatcher(name, _originals[name]))


def _uninstall_if_unused() -> None:
    if _originals and not _engines:
        for name, function in _originals.items():
            setattr(GenerationMixin, name, function)
        _originals.clear()


def _dispatcher(name: str, original: Callable) -> Callable:
    @functools.wraps(original)  # generate() reads the method's signature
    def method(self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any,
               generation_config: Any, **options: Any) -> Any:  # fmt: skip
        def plain() -> Any:
            return original(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                **options,
            )

        engine = _engines.get(self)
        if engine is None or getattr(generation_config, "is_assistant", False):
            return plain()
        from specdec_kernels.hf.generate import PlainDecoding, generate

        logits_processor = with_penalties(logits_processor, generation_config, input_ids.shape[1])
        try:
            return generate(
                engine,
                self,
                name,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                options,
            )
        except PlainDecoding as decision:
            engine.warn_plain(str(decision))
        except UnsupportedModelError as error:
            if engine.proven:
                raise
            engine.unsupported = str(error)
            engine.warn_plain(engine.unsupported)
        return plain()

    return method
