"""A model's answers to prompts, and its hidden states while it reads them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from corpus import prompts
from torch import Tensor

import specdec_kernels as sdk
from specdec_kernels.hf.features import FeatureTap

AROUND = 64  # answers at a time
MOST_READ = 4096  # tokens in one forward


class Text(NamedTuple):
    """ids int64 [n]: prompt and answer. features [n, L * d]: hidden states of L layers, last one
    [n, d] what lm_head reads."""

    ids: Tensor
    features: Tensor
    last: Tensor


def log(message: str) -> None:
    print(f"{time.process_time() / 60:6.1f} CPU minutes  {message}", flush=True)


def own_texts(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[Tensor]:
    """Prompts with the model's answers, from `work` where an earlier run left them."""
    kept = Path(options.work) / f"answers-{options.prompts}-{options.answer}-{options.seed}.pt"
    if kept.exists():
        return torch.load(kept, weights_only=True)
    texts: list[Tensor] = []
    questions = prompts(options.prompts, options.seed)
    for ids in answers(model, tokenizer, questions, options.answer, options.seed):
        texts.append(ids)
        if len(texts) % AROUND == 0:
            log(f"{len(texts)} of {options.prompts} answers")
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save(texts, kept)
    return texts


def answers(
    model: Any, tokenizer: Any, questions: Iterable[str], max_new_tokens: int, seed: int
) -> Iterator[Tensor]:
    """Prompt and answer, int64 [n]; every other group is sampled at temperature 0.7, not greedy."""
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    torch.manual_seed(seed)
    with sdk.patched(model, method="none"):
        for number, group in enumerate(_groups(questions, AROUND, key=len)):
            chats = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                for question in group
            ]
            inputs = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
            sampled = {"do_sample": True, "temperature": 0.7} if number % 2 else {}
            rows = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.eos_token_id,
                **sampled,
            )
            lengths = inputs["attention_mask"].sum(1)
            for row, length in zip(rows, lengths.tolist(), strict=True):
                start = inputs["input_ids"].shape[1] - length
                yield _ended(row[start:], length, tokenizer.eos_token_id)


def _ended(ids: Tensor, prompt: int, eos: int) -> Tensor:
    """Without what generate fills up behind the end."""
    ends = (ids[prompt:] == eos).nonzero()
    return ids[: prompt + int(ends[0]) + 1] if len(ends) else ids


def own_states(
    model: Any, texts: Sequence[Tensor], layers: Sequence[int], options: argparse.Namespace
) -> list[Text]:
    """What `read` finds, from `work` where an earlier run left it."""
    name = "-".join(map(str, (options.prompts, options.answer, options.seed, *layers)))
    kept = Path(options.work) / f"states-{name}.pt"
    if kept.exists():
        return [Text(*text) for text in torch.load(kept, weights_only=True)]
    found = read(model, texts, layers)
    torch.save([tuple(text) for text in found], kept)
    return found


@torch.no_grad()
def read(model: Any, texts: Sequence[Tensor], layers: Sequence[int]) -> list[Text]:
    """The hidden states of every text, in its order and in the model's dtype.

    layers: as transformers counts `hidden_states`; () leaves features [n, 0].
    """
    last = model.config.get_text_config().num_hidden_layers
    tap = FeatureTap(model, [*layers, last])
    decoder = model.get_decoder()
    found: list[Text | None] = [None] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    done = 0
    while done < len(order):
        count = max(MOST_READ // len(texts[order[done]]), 1)
        group = order[done : done + count]
        ids = torch.nn.utils.rnn.pad_sequence([texts[i] for i in group], batch_first=True)
        with tap.caught() as caught:
            decoder(input_ids=ids, use_cache=False)  # padding stands behind: nothing sees it
        states = tap.joined(caught)
        assert states is not None
        size = states.shape[-1] // (len(layers) + 1)
        for row, i in zip(states, group, strict=True):
            n = len(texts[i])
            found[i] = Text(texts[i], row[:n, :-size].clone(), row[:n, -size:].clone())
        if (done + len(group)) * 10 // len(order) > done * 10 // len(order):
            log(f"hidden states of {done + len(group)} of {len(order)} texts")
        done += len(group)
    return [text for text in found if text is not None]


def _groups(items: Iterable[Any], size: int, key: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Of about the same length, so that little is padding."""
    pool = sorted(items, key=key)
    for start in range(0, len(pool), size):
        yield pool[start : start + size]
