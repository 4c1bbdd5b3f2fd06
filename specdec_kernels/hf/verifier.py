"""Which verifier a call of generate gets: the kernels', or a walk through its processors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import GenerationConfig, LogitsProcessorList

from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.config_checks import normal_seed
from specdec_kernels.decoding.verify import KernelVerifier
from specdec_kernels.hf.grammar import TreeMasks
from specdec_kernels.hf.parameters import KernelParameters, kernel_parameters
from specdec_kernels.hf.seeds import row_seeds
from specdec_kernels.hf.text import PaddedText
from specdec_kernels.hf.walk import Walk
from specdec_kernels.tree import SamplingParams

if TYPE_CHECKING:
    from specdec_kernels.hf.patch import Engine


def kernel_verifier(
    engine: Engine,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    text: PaddedText,
    vocab: int,
) -> KernelVerifier | None:
    """None when the kernels cannot do all of it: the call then needs a walk."""
    settings, rows = engine.config, text.rows
    sampled, padded = bool(config.do_sample), text.prompts
    if _keeps(config) or (sampled and settings.rng == "torch"):
        return None
    parameters = kernel_parameters(processors, padded, vocab, warpers=sampled)
    if parameters is None:
        return None
    if not sampled:
        return _greedy(parameters, text)
    if settings.rule == "typical":
        engine.warn("rule 'typical' is lossy: sampled text is not distributed as the target's")
    device = rows.tokens.device
    return KernelVerifier(
        parameters.sampling(_seeds(settings, config, len(rows)), device),
        history=parameters.history(padded, device),
        masks=TreeMasks(parameters.maskers, text) if parameters.maskers else None,
        rule=settings.rule,
        posterior_threshold=settings.posterior_threshold,
        posterior_alpha=settings.posterior_alpha,
    )


def _greedy(parameters: KernelParameters, text: PaddedText) -> KernelVerifier:
    if not parameters:
        return KernelVerifier(None)
    device = text.rows.tokens.device
    parameters.temperature = 0.0
    return KernelVerifier(
        parameters.sampling([0] * len(text.rows), device),
        history=parameters.history(text.prompts, device),
        masks=TreeMasks(parameters.maskers, text) if parameters.maskers else None,
        rule="coupled",
    )


def walk(
    settings: SpeculativeConfig,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    text: PaddedText,
) -> Walk:
    sampling, multinomial = None, False
    if config.do_sample:
        multinomial = settings.rng == "torch"
        seeds = _seeds(settings, config, len(text.rows))
        if not multinomial:
            device = text.rows.tokens.device
            sampling = SamplingParams.make(len(seeds), seed=seeds, device=device)
    returned = bool(config.return_dict_in_generate)
    return Walk(
        processors,
        text,
        sampling,
        multinomial=multinomial,
        keeps_scores=returned and bool(config.output_scores),
        keeps_logits=returned and bool(config.output_logits),
    )


def _keeps(config: GenerationConfig) -> bool:
    return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))


def _seeds(settings: SpeculativeConfig, config: GenerationConfig, batch: int) -> list[int]:
    """The generation config's seed wins over that of `patch`."""
    own = normal_seed(getattr(config, "seed", None))
    if settings.rng == "torch":
        if own is not None:
            raise ValueError(f"seed: expected none with rng='torch', got {own!r}")
        return []
    return row_seeds(settings.seed if own is None else own, batch)
