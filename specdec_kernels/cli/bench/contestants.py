"""Who takes part: transformers' own ways to generate, economize where it is installed, and ours.

All share one set of weights. Each answers the same rows to the same length: no token ends a text.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels as sdk
from specdec_kernels.cli.console import CliError
from specdec_kernels.cli.model import quiet_transformers
from specdec_kernels.cli.runs import LOOKUP, share_weights

SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 0}
SEED = 20


class Outcome(NamedTuple):
    """What one call wrote (new tokens of each row), how long it took, and our counts."""

    tokens: list[list[int]]
    seconds: float
    metrics: dict[str, Any] | None


class Contestant(NamedTuple):
    """run(inputs, new_tokens, sampled).

    most_rows: how many rows it takes at once, if limited. compiles: for each shape of its cache, so
    that only a run like the measured one warms it up.
    """

    name: str
    run: Callable[[Mapping[str, Tensor], int, bool], Outcome]
    most_rows: int | None = None
    compiles: bool = False


@contextlib.contextmanager
def assemble(
    model: Any, methods: Mapping[str, Mapping[str, Any]], assistant: Any | None, compiled: bool
):
    """Everyone, plain first. methods: options of `patch` by name. assistant: a draft model for
    transformers' assisted generation."""
    never_ends(model)
    everyone = [
        Contestant("plain", by_generate(model)),
        Contestant("prompt_lookup", by_generate(model, **LOOKUP), most_rows=1),
    ]
    if compiled:
        run = by_generate(model, **static_options())
        everyone.insert(1, Contestant("plain_compiled", run, compiles=True))
    if assistant is not None:
        everyone.append(
            Contestant("assisted", by_generate(model, assistant_model=assistant), most_rows=1)
        )
    if importlib.util.find_spec("economize") is not None:
        everyone.append(Contestant("economize_lookup", by_economize(model)))
    with contextlib.ExitStack() as stack:
        for name, options in methods.items():
            own = share_weights(model)
            try:
                stack.enter_context(sdk.patched(own, **options))
            except (TypeError, ValueError, ImportError) as error:
                raise CliError(f"--method {name}: {error}") from error
            everyone.append(Contestant(name, by_generate(own)))
        yield everyone


def never_ends(model: Any) -> None:
    """Texts go on to the length that is asked for, so that all are equally long."""
    config = model.generation_config
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = end[0] if isinstance(end, (list, tuple)) else (end or 0)
    config.eos_token_id = None


def static_options() -> dict[str, Any]:
    """A static cache and torch.compile, on CPUs too."""
    from transformers.generation.configuration_utils import CompileConfig

    compile_config = CompileConfig()
    compile_config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": compile_config}


def by_generate(model: Any, **extra: Any) -> Callable[..., Outcome]:
    def run(inputs: Mapping[str, Tensor], new_tokens: int, sampled: bool) -> Outcome:
        counts = _counts(model)
        torch.manual_seed(SEED)
        settings = {"do_sample": True, **SAMPLING} if sampled else {"do_sample": False}
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            output = model.generate(**inputs, max_new_tokens=new_tokens, **settings, **extra)
            seconds = time.perf_counter() - start
        tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
        return Outcome(tokens, seconds, None if counts is None else counts.snapshot())

    return run


def _counts(model: Any) -> Any | None:
    """The model's metrics, from now on; None for a model that is not patched."""
    try:
        counts = sdk.metrics(model)
    except ValueError:
        return None
    counts.reset()
    return counts


def by_economize(model: Any) -> Callable[..., Outcome]:
    """Prompt lookup of the package economize, as its benchmarks configure it."""
    import economize
    from economize.techniques.lookup import LookupConfig

    own = economize.apply(share_weights(model), LookupConfig())

    def run(inputs: Mapping[str, Tensor], new_tokens: int, sampled: bool) -> Outcome:
        options = {"verifier": "rejection"} if sampled else {}
        decoding = economize.DecodeConfig(cycle_length=9, **options)
        selector = None
        if sampled:
            selector = economize.TopPSampler(SAMPLING["temperature"], SAMPLING["top_p"], SEED)
        kept = inputs["attention_mask"].bool()
        prompts = [row[mask] for row, mask in zip(inputs["input_ids"], kept, strict=True)]
        start = time.perf_counter()
        found = own.decode_batch(prompts, new_tokens, decoding=decoding, selector=selector)
        seconds = time.perf_counter() - start
        return Outcome([row.tokens.tolist() for row in found], seconds, None)

    return run
