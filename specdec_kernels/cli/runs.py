"""One timed run of each of the demo's methods, and the checks on what it wrote."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import specdec_kernels as sdk
from specdec_kernels.cli.model import quiet_transformers
from specdec_kernels.metrics import Metrics

METHODS = ("plain", "prompt_lookup", "specdec")
DRAFTED = "specdec_draft"
LOOKUP = {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}


@dataclass
class Run:
    """What one call of generate() wrote, how long it took, and its drafting counts."""

    tokens: list[int]
    seconds: float
    first_token_seconds: float
    metrics: dict[str, Any] | None


class Clock:
    """A streamer that only notes when the first token came and when the text was complete."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.calls = 0
        self.first_token_seconds = self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.first_token_seconds = time.perf_counter() - self.start

    def end(self) -> None:
        self.seconds = time.perf_counter() - self.start


class Contest:
    """A plain model and patched ones over the same weights, so that runs can take turns.

    draft: what `patch` takes as `model`; with it one more method takes part, DRAFTED.
    """

    def __init__(self, model: Any, draft: str | None = None) -> None:
        self.plain = model
        self.options: dict[str, dict[str, Any]] = {"specdec": {}}
        if draft is not None:
            self.options[DRAFTED] = {"model": draft}
        self.patched = {name: share_weights(model) for name in self.options}
        self.methods = tuple(dict.fromkeys((*METHODS, *self.options)))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Contest:
        with contextlib.ExitStack() as stack:
            for name, options in self.options.items():
                stack.enter_context(sdk.patched(self.patched[name], **options))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, input_ids: torch.Tensor, new_tokens: int, method: str) -> Run:
        """A greedy run by one of `methods`."""
        counts = Metrics()
        model, kwargs = self.plain, {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_transformers())
            if method == "prompt_lookup":
                kwargs = LOOKUP
                stack.enter_context(count_prompt_lookup(counts))
            elif method in self.patched:
                model = self.patched[method]
                counts = sdk.metrics(model)
                counts.reset()
            clock = Clock()
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                streamer=clock,
                **kwargs,
            )
        metrics = None if method == "plain" else counts.snapshot()
        tokens = output[0, input_ids.shape[1] :].tolist()
        return Run(tokens, clock.seconds, clock.first_token_seconds, metrics)


def share_weights(model: Any) -> Any:
    """Another model over the same tensors."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@contextlib.contextmanager
def count_prompt_lookup(counts: Metrics) -> Iterator[None]:
    """Counts drafted and accepted tokens of transformers' own prompt lookup while inside."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator as Lookup

    get, update = Lookup.get_candidates, Lookup.update_candidate_strategy
    drafted = 0

    def counted_get(self, input_ids, *args, **kwargs):
        nonlocal drafted
        result = get(self, input_ids, *args, **kwargs)
        drafted = result[0].shape[1] - input_ids.shape[1]
        return result

    def counted_update(self, input_ids, scores, num_matches):
        counts.record_row(drafted, int(num_matches))
        counts.num_steps += 1
        return update(self, input_ids, scores, num_matches)

    Lookup.get_candidates, Lookup.update_candidate_strategy = counted_get, counted_update
    try:
        yield
    finally:
        Lookup.get_candidates, Lookup.update_candidate_strategy = get, update


@torch.inference_mode()
def largest_logit_gap(model: Any, input_ids: torch.Tensor, tokens: list[int]) -> float:
    """How far below the argmax an emitted token lies at worst, under teacher forcing.

    0 says that every token is the argmax of one forward over the whole text.
    """
    emitted = torch.tensor([tokens], device=input_ids.device)
    logits = model(torch.cat([input_ids, emitted], dim=1), use_cache=False).logits[0]
    logits = logits[input_ids.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, emitted[0][:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())
