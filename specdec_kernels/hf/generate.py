"""One call of `generate`: prefill by the model's own attention, our loop, transformers' output."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec_kernels.decoding.controller import Controller
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import Verifier, WalkVerifier
from specdec_kernels.drafting.factory import Sources, make_drafter
from specdec_kernels.drafting.marginals import MarginalDrafter
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.buffers import bucket_of
from specdec_kernels.hf.model import CachedModel, max_positions
from specdec_kernels.hf.processors import of_unknown_state
from specdec_kernels.hf.seeds import generator_state
from specdec_kernels.hf.support import why_plain
from specdec_kernels.hf.text import PaddedText
from specdec_kernels.hf.verifier import kernel_verifier, walk
from specdec_kernels.hf.walk import Walk
from specdec_kernels.metrics import Metrics
from specdec_kernels.tree import DraftTree

if TYPE_CHECKING:
    from specdec_kernels.hf.patch import Engine


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """metrics: what `Metrics.snapshot` says of this call, and under "requests" of each row."""

    metrics: dict[str, Any] | None = None


class PlainDecoding(Exception):
    """This call has to run plain; the text says why."""


@torch.no_grad()
def generate(
    engine: Engine,
    model: PreTrainedModel,
    method: str,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    options: dict[str, Any],
) -> Any:
    """What `_sample` returns: ids [B, L], or a SpeculativeOutput."""
    unsafe = of_unknown_state(processors)
    reason = engine.unsupported or why_plain(
        model, method, input_ids, processors, unsafe, criteria, config, options
    )
    if not reason and config.do_sample and engine.config.rng == "torch" and len(input_ids) > 1:
        reason = "rng='torch' with more than one row"
    if reason:
        raise PlainDecoding(reason)
    restore_generator = None if engine.proven else generator_state(input_ids.device)
    run = Run(engine, model, input_ids, processors, criteria, config, options)
    try:
        run.prefill()
        run.decode()
    except Exception as error:
        if not isinstance(error, UnsupportedModelError) or engine.proven:
            run.end_stream()
        elif restore_generator is not None:
            restore_generator()
        raise
    finally:
        run.target.end()
    run.end_stream()
    return run.output()


class Run:
    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        options: dict[str, Any],
    ):
        self.engine, self.model, self.input_ids, self.config = engine, model, input_ids, config
        self.streamer = options.get("streamer")
        self.options = {k: v for k, v in options.items() if k not in ("streamer", "synced_gpus")}
        self.metrics = Metrics()
        wanted = len(input_ids) if config.return_dict_in_generate else 0
        self.requests = [Metrics(num_new_tokens=1) for _ in range(wanted)]
        self.held: list[tuple[int, bool]] | None = None if engine.proven else []
        self.criteria = StoppingCriteriaList(
            c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        self.rows = self._rows(criteria)
        self.text = PaddedText(input_ids, self.rows)
        self.walk: Walk | None = None
        self.verifier = self._verifier(processors)
        assert engine.runner is not None
        widest = bucket_of(1 + engine.config.most_drafted)
        slots = max(self.rows.prompt_lens) + self.rows.max_new_tokens + widest
        size = len(self.rows), slots, input_ids.device, engine.warn
        self.draft = None if engine.draft is None else engine.draft.run(*size)
        self.drafter = make_drafter(
            engine.config,
            self.rows.eos_token_ids,
            Sources(engine.suffix_cache, self.draft, engine.recorded),
            self.metrics.record_drafter,
        )
        self.target = CachedModel(model, engine.runner, *size, self.drafter.hidden_layers)

    def _rows(self, criteria: StoppingCriteriaList) -> Rows:
        batch, width = self.input_ids.shape
        mask = self.options.get("attention_mask")
        lens = [width] * batch if mask is None else (mask != 0).sum(1).tolist()
        limit = max_positions(self.model)
        if min(lens, default=0) == 0:
            raise ValueError(
                "generate: expected at least one token in every prompt, got an empty one"
            )
        if limit is not None and max(lens) > limit:
            raise ValueError(
                f"generate: expected prompts of at most {limit} tokens (max_position_embeddings), "
                f"got {max(lens)}"
            )
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        ends = [c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria]
        return Rows(
            [row[width - n :] for row, n in zip(self.input_ids.tolist(), lens, strict=True)],
            min(lengths, default=self.config.max_length) - width,
            frozenset(token for tokens in ends for token in tokens),
            self.input_ids.device,
            self._should_stop if self.criteria else None,
            self._on_token if self.streamer is not None else None,
        )

    def _verifier(self, processors: LogitsProcessorList) -> Verifier:
        vocab = self.model.config.get_text_config().vocab_size
        by_kernel = kernel_verifier(self.engine, processors, self.config, self.text, vocab)
        if by_kernel is not None:
            return by_kernel
        self.walk = walk(self.engine.config, processors, self.config, self.text)
        return WalkVerifier(self.walk.pick)

    def prefill(self) -> None:
        started = time.perf_counter()
        output = self.target.prefill_by(self._prefill_forward, self.rows.prompt_lens)
        self.metrics.seconds["prefill"] += time.perf_counter() - started
        self.verifier.first(output.logits[:, -1], self.rows)
        self.metrics.num_new_tokens += len(self.rows)

    def _prefill_forward(self, inputs: dict[str, Any]) -> Any:
        model, options = self.model, {**self.options, **inputs}
        if hasattr(model, "_prefill"):
            return model._prefill(self.input_ids, self.config, options)
        width = self.input_ids.shape[1]
        options["cache_position"] = torch.arange(width, device=self.input_ids.device)
        return model(
            **model.prepare_inputs_for_generation(self.input_ids, **options), return_dict=True
        )

    def decode(self) -> None:
        settings = self.engine.config
        controller = Controller(
            self.engine.costs,
            self.engine.acceptance,
            fixed=settings.num_speculative_tokens,
            largest=settings.max_speculative_tokens,
            table=settings.num_speculative_tokens_per_batch_size or (),
            smallest=max(settings.draft_min_tokens, 1),
            draft_cost=None if self.draft is None else self.draft.cost,
            expected=self.drafter.expected if isinstance(self.drafter, MarginalDrafter) else None,
        )
        loop = Loop(
            self._forward,
            self.target.kv,
            self.rows,
            self.drafter,
            self.verifier,
            controller,
            self.metrics,
            max_positions(self.model),
            self.target.features,
            self.requests,
            lambda: self.target.prepared,
        )
        with contextlib.ExitStack() as stack:
            for model in (self.target, self.draft):
                if model is not None:
                    stack.enter_context(model.runner.hold())
            loop.run()
        self._release_held()
        self.engine.metrics.add(self.metrics)

    def _forward(self, tree: DraftTree) -> tuple[Tensor, Tensor | None]:
        logits = self.target.forward(tree)
        self.engine.proven = True
        self._release_held()
        return logits, self.target.features

    def _should_stop(self, b: int, new: list[int]) -> bool:
        scores = self.walk.scores[b] if self.walk is not None and self.walk.keeps_scores else None
        return bool(self.criteria(self.text.ids([b]), scores and tuple(scores)).all())

    def _on_token(self, b: int, token: int, drafted: bool) -> None:
        if self.held is not None:
            self.held.append((token, drafted))
            return
        assert self.streamer is not None  # Rows calls this only with a streamer
        put = self.streamer.put
        if drafted:
            put = getattr(self.streamer, "put_accepted", put)
        put(torch.tensor([token]))

    def _release_held(self) -> None:
        """The first tokens wait until a verify forward has shown that the model is supported."""
        held, self.held = self.held, None
        for token, drafted in held or []:
            self._on_token(0, token, drafted)

    def end_stream(self) -> None:
        """Also after an error: whoever reads the streamer in another thread waits for the end."""
        self._release_held()
        if self.streamer is not None:
            self.streamer.end()

    def output(self) -> Any:
        longest = max(len(new) for new in self.rows.new)
        pad = self.config._pad_token_tensor
        fill = 0 if pad is None else int(pad)
        sequences = torch.tensor(
            [
                prompt + new + [fill] * (longest - len(new))
                for prompt, new in zip(self.text.prompts, self.rows.new, strict=True)
            ],
            device=self.input_ids.device,
        )
        if not self.config.return_dict_in_generate:
            return sequences
        scores, logits = (None, None) if self.walk is None else self.walk.kept()
        requests = [request.counts() for request in self.requests]
        return SpeculativeOutput(
            sequences=sequences,
            scores=scores,
            logits=logits,
            metrics={**self.metrics.snapshot(), "requests": requests},
        )


__all__ = ["PlainDecoding", "UnsupportedModelError", "generate"]
