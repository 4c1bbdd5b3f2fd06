"""One call of `generate`: prefill by the model's own attention, our loop, transformers' output."""

from __future__ import annotations

import contextlib
import time
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

from specdec_kernels.cache import RaggedKV
from specdec_kernels.decoding.controller import Controller
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import KernelVerifier, Verifier, WalkVerifier
from specdec_kernels.drafting import make_drafter
from specdec_kernels.hf.attention import UnsupportedModelError, Window
from specdec_kernels.hf.cache import RaggedCache
from specdec_kernels.hf.processors import (
    kernel_parameters,
    make_sampling,
    of_unknown_state,
    per_row,
    row_seeds,
)
from specdec_kernels.hf.support import cache_argument, why_plain
from specdec_kernels.metrics import Metrics
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import DraftTree

if TYPE_CHECKING:
    from specdec_kernels.hf.patch import Engine


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
    """What `_sample` returns: ids [B, L], or a GenerateDecoderOnlyOutput."""
    unsafe = of_unknown_state(processors)
    reason = engine.unsupported or why_plain(
        model, method, input_ids, processors, unsafe, criteria, config, options
    )
    if reason:
        raise PlainDecoding(reason)
    run = Run(engine, model, input_ids, processors, criteria, config, options)
    run.prefill()
    run.decode()
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
        self.streamer = options.pop("streamer", None)
        self.options = {k: v for k, v in options.items() if k != "synced_gpus"}
        self.metrics = Metrics()
        self.held: list[tuple[int, bool]] | None = None if engine.proven else []
        self.criteria = StoppingCriteriaList(
            c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)
        )
        self.scores: list[list[Tensor]] = [[] for _ in range(len(input_ids))]
        self.logits: list[list[Tensor]] = [[] for _ in range(len(input_ids))]
        self.padded = input_ids.tolist()
        self.rows = self._rows(criteria)
        self.verifier = self._verifier(processors)

    def _rows(self, criteria: StoppingCriteriaList) -> Rows:
        batch, width = self.input_ids.shape
        mask = self.options.get("attention_mask")
        lens = [width] * batch if mask is None else (mask != 0).sum(1).tolist()
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if min(lens, default=0) == 0:
            raise ValueError(
                "generate: expected at least one token in every prompt, got an empty one"
            )
        if limit is not None and max(lens) > limit:
            raise ValueError(
                f"generate: expected prompts of at most {limit} tokens (max_position_embeddings), "
                f"got {max(lens)}"
            )
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.max_positions = limit
        eos = self.config._eos_token_tensor
        return Rows(
            [row[width - n :] for row, n in zip(self.padded, lens, strict=True)],
            min([*lengths, self.config.max_length]) - width,
            frozenset() if eos is None else frozenset(eos.flatten().tolist()),
            self.input_ids.device,
            self._should_stop if self.criteria else None,
            self._on_token if self.streamer is not None else None,
        )

    def _verifier(self, processors: LogitsProcessorList) -> Verifier:
        batch, device = len(self.rows), self.input_ids.device
        self.keeps_scores = self.config.return_dict_in_generate and (
            self.config.output_scores or self.config.output_logits
        )
        sampled = self.config.do_sample
        parameters = kernel_parameters(processors) if sampled else ({} if not processors else None)
        seeds = row_seeds(self.engine.config.seed, batch) if sampled else []
        if parameters is not None and not self.keeps_scores:
            return KernelVerifier(make_sampling(seeds, device, **parameters) if sampled else None)
        self.processors = per_row(processors, batch)
        self.samplings = [make_sampling([seed], device) for seed in seeds]
        return WalkVerifier(self._pick)

    def prefill(self) -> None:
        started = time.perf_counter()
        rows, model = self.rows, self.model
        self.kv = RaggedKV(len(rows), self.config.max_length + 1, self.input_ids.device)
        self.cache = RaggedCache(model, self.kv, rows.prompt_lens)
        options = {**self.options, cache_argument(model): self.cache}
        with contextlib.ExitStack() as stack:
            if self.engine.linear is not None:
                stack.enter_context(self.engine.linear.prefill())
            output = self._prefill_forward(options)
        self.cache.end_prefill()
        self.metrics.seconds["prefill"] += time.perf_counter() - started
        self.verifier.first(output.logits[:, -1], rows)
        self.metrics.num_new_tokens += len(rows)

    def _prefill_forward(self, options: dict[str, Any]) -> Any:
        model = self.model
        if hasattr(model, "_prefill"):
            return model._prefill(self.input_ids, self.config, options)
        width = self.input_ids.shape[1]
        options["cache_position"] = torch.arange(width, device=self.input_ids.device)
        inputs = model.prepare_inputs_for_generation(self.input_ids, **options)
        return model(**inputs, return_dict=True)

    def decode(self) -> None:
        settings = self.engine.config
        controller = Controller(
            self.engine.costs,
            self.engine.acceptance,
            fixed=settings.num_speculative_tokens,
            largest=settings.max_speculative_tokens,
        )
        loop = Loop(
            self._forward,
            self.kv,
            self.rows,
            make_drafter(settings, self.rows.eos_token_ids),
            self.verifier,
            controller,
            self.metrics,
            self.max_positions,
        )
        loop.run()
        self._release_held()
        self.engine.metrics.add(self.metrics)

    def _forward(self, tree: DraftTree) -> Tensor:
        prefix = self.kv.prefix_len.long()[:, None]
        depth = (
            torch.arange(tree.draft_token_ids.shape[1], device=prefix.device)[None]
            if tree.depth is None
            else tree.depth
        )
        inputs = {
            "input_ids": tree.draft_token_ids,
            "position_ids": prefix + depth,
            cache_argument(self.model): self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if not hasattr(self.model, "_prefill"):
            start = max(self.kv.lens)
            inputs["cache_position"] = torch.arange(
                start, start + tree.draft_token_ids.shape[1], device=prefix.device
            )
        window = Window(tree, self.kv.prefix_len)
        logits = self.engine.verify_logits(self.model, window, inputs)
        self.engine.proven = True
        self._release_held()
        return logits

    def _pick(self, b: int, logits: Tensor) -> int:
        """One plain decoding step of row b: processors on its true prefix, then the choice."""
        raw = logits[None].to(torch.float32, copy=True)
        ids = torch.tensor([self.padded[b] + self.rows.new[b]], device=self.input_ids.device)
        scores = self.processors[b](ids, raw.clone())
        if self.keeps_scores:
            self.scores[b].append(scores)
            self.logits[b].append(raw)
        if not self.config.do_sample:
            return int(scores.argmax(-1))
        position = torch.tensor([self.rows.length(b)], device=scores.device)
        return int(sample(scores, self.samplings[b]._replace(position=position)))

    def _should_stop(self, b: int, new: list[int]) -> bool:
        ids = torch.tensor([self.padded[b] + new], device=self.input_ids.device)
        scores = tuple(self.scores[b]) if self.config.output_scores else None
        return bool(self.criteria(ids, scores).all())

    def _on_token(self, b: int, token: int, drafted: bool) -> None:
        if self.held is not None:
            self.held.append((token, drafted))
            return
        put = self.streamer.put
        if drafted:
            put = getattr(self.streamer, "put_accepted", put)
        put(torch.tensor([token]))

    def _release_held(self) -> None:
        """The first tokens wait until a verify forward has shown that the model is supported."""
        held, self.held = self.held, None
        for token, drafted in held or []:
            self._on_token(0, token, drafted)

    def output(self) -> Any:
        if self.streamer is not None:
            self.streamer.end()
        longest = max(len(new) for new in self.rows.new)
        pad = self.config._pad_token_tensor
        fill = 0 if pad is None else int(pad)
        sequences = torch.tensor(
            [
                prompt + new + [fill] * (longest - len(new))
                for prompt, new in zip(self.padded, self.rows.new, strict=True)
            ],
            device=self.input_ids.device,
        )
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._stacked(self.scores) if self.config.output_scores else None,
            logits=self._stacked(self.logits) if self.config.output_logits else None,
        )

    def _stacked(self, kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
        """One [B, V] tensor per step; rows that had finished by then hold -inf."""
        empty = torch.full_like(kept[0][0], float("-inf"))
        longest = max(len(row) for row in kept)
        return tuple(
            torch.cat([row[t] if t < len(row) else empty for row in kept]) for t in range(longest)
        )


__all__ = ["PlainDecoding", "UnsupportedModelError", "generate"]
