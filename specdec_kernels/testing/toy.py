"""A toy language model whose distributions can be written down, and the filters of its sampling."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.ops.sample.reference import edit, prepare
from specdec_kernels.tree import SamplingParams


class Filters(NamedTuple):
    """One setting of SamplingParams for all rows; `bias` has one number per token, or none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[float, ...] = ()

    def __str__(self) -> str:
        changed = {k: v for k, v in self._asdict().items() if v != Filters._field_defaults[k]}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "no filters"

    @property
    def edits_logits(self) -> bool:
        return self[4:] != Filters()[4:]

    def sampling(
        self,
        prompt: Tensor,
        generated: Tensor,
        vocab: int,
        *,
        seed: Tensor,
        position: Tensor,
        step: Tensor,
    ) -> SamplingParams:
        """For rows with this text: prompt [N, P] and generated tokens [N, G], -1 padded."""
        params = SamplingParams.make(
            len(prompt),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
            position=position,
            step=step,
            device=prompt.device,
        )
        if not self.edits_logits:
            return params
        like = params.temperature
        return params._replace(
            token_ids=torch.arange(vocab, device=like.device).expand(len(prompt), -1),
            token_bias=like.new_tensor(self.bias).expand(len(prompt), -1) if self.bias else None,
            token_counts=text_counts(prompt, generated, vocab),
            repetition_penalty=torch.full_like(like, self.repetition_penalty),
            presence_penalty=torch.full_like(like, self.presence_penalty),
            frequency_penalty=torch.full_like(like, self.frequency_penalty),
        )


def text_counts(prompt: Tensor, generated: Tensor, vocab: int) -> Tensor:
    """How often each token was generated, int32 [N, vocab]; 0 in the prompt alone, -1 nowhere."""
    counts = torch.zeros(len(prompt), vocab + 1, dtype=torch.int32, device=prompt.device)
    in_prompt = counts.scatter(1, prompt, 1)[:, :vocab] > 0
    places = torch.where(generated < 0, vocab, generated)
    counts = counts.scatter_add(1, places, torch.ones_like(places, dtype=torch.int32))[:, :vocab]
    return torch.where((counts == 0) & ~in_prompt, -1, counts)


def processed(logits: Tensor, sampling: SamplingParams, path: Tensor | None = None) -> Tensor:
    """Logits [N, V], none of them NaN, whose plain softmax is the distribution that is sampled.

    sampling: one value per row. path: drafted tokens behind each row's text, [N, P], -1 padded.
    """
    every = torch.arange(len(logits), device=logits.device)
    logits = edit(logits, sampling.edits, every, path)
    temperature, top_k, top_p, min_p = sampling[:4]
    if bool(((temperature > 0) & (top_k <= 0) & (top_p >= 1) & (min_p <= 0)).all()):
        return logits / temperature.to(logits.dtype).unsqueeze(1)
    rows = prepare(logits, temperature, top_k, top_p, min_p)
    kept = torch.where(rows.kept, rows.logits, -math.inf)
    one_hot = torch.full_like(kept, -math.inf).scatter(1, rows.greedy.unsqueeze(1), 0.0)
    return torch.where(rows.decided.unsqueeze(1), one_hot, kept)


class ToyModel:
    """A language model whose logits depend on the last two tokens.

    `outputs` makes it predict fewer or more tokens than it reads (a draft vocabulary).
    """

    def __init__(
        self,
        vocab: int,
        seed: int,
        *,
        scale: float = 1.5,
        outputs: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.table = torch.randn(vocab, vocab, outputs or vocab, generator=g).to(device) * scale

    def logits(self, before: Tensor, last: Tensor) -> Tensor:
        """fp32 [..., outputs] behind the tokens `before`, `last`, clamped to the vocabulary."""
        return self.table[before.clamp(0, self.vocab - 1), last.clamp(0, self.vocab - 1)]

    def draft_of(self, likeness: float, seed: int) -> ToyModel:
        """A draft model: a mix of this one and another."""
        other = ToyModel(self.vocab, seed, device=self.table.device)
        other.table = likeness * self.table + (1 - likeness) * other.table
        return other


def sequences(vocab: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """All sequences of tokens in order, [vocab ** length, length]."""
    place = vocab ** torch.arange(length - 1, -1, -1, device=device)
    return torch.arange(vocab**length, device=device).unsqueeze(1) // place % vocab


def conditionals(
    model: ToyModel, prompt: tuple[int, int], num_tokens: int, filters: Filters
) -> list[Tensor]:
    """For each of the next tokens its probabilities given those before it, fp64 [V] * (i + 1)."""
    result = []
    for length in range(num_tokens):
        drawn = sequences(model.vocab, length, model.table.device)
        start = drawn.new_tensor(prompt).expand(len(drawn), -1)
        text = torch.cat([start, drawn], 1)
        zeros = torch.zeros_like(text[:, 0])
        sampling = filters.sampling(
            start, drawn, model.vocab, seed=zeros, position=zeros, step=zeros
        )
        logits = model.logits(text[:, -2], text[:, -1]).double()
        rows = torch.softmax(processed(logits, sampling), -1)
        result.append(rows.view((model.vocab,) * (length + 1)))
    return result


def exact_joint(
    model: ToyModel, prompt: tuple[int, int], num_tokens: int, filters: Filters
) -> Tensor:
    """Probabilities of the next tokens by enumeration, fp64 [V] * num_tokens."""
    return chain_rule(conditionals(model, prompt, num_tokens, filters))


def chain_rule(rows: list[Tensor]) -> Tensor:
    joint = torch.ones_like(rows[0][..., 0])
    for row in rows:
        joint = joint.unsqueeze(-1) * row
    return joint
