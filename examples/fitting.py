"""The loop that trains: batches of texts of one length, two optimizers, one schedule."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from distill import Text, log
from torch import Tensor, nn
from unrolled import Batch

HELD_OUT = 20  # every so many texts one is for measuring only


def held_out(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """The texts to learn from, and those to measure with."""
    return [t for i, t in enumerate(texts) if i % HELD_OUT], list(texts[::HELD_OUT])


def fit(
    network: nn.Module,
    tables: Sequence[nn.Parameter],
    texts: Sequence[Text],
    loss: Callable[[Batch], Tensor],
    measure: Callable[[], list[float]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Trains `network` and returns what was measured on the way.

    Matrices are learnt by Muon, `tables` of tokens and vectors by AdamW at half the rate.
    """
    apart = {id(table) for table in tables}
    learnt = [p for p in network.parameters() if p.requires_grad]
    matrices = [p for p in learnt if p.dim() == 2 and id(p) not in apart]
    others = [p for p in learnt if p.dim() != 2 or id(p) in apart]
    optimizers = {
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"): 1.0,
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0): 0.5,
    }
    rng = random.Random(options.seed)
    record: list[dict[str, Any]] = []
    losses: list[float] = []
    waiting: list[list[Text]] = []
    started = time.process_time()
    for update in range(1, options.updates + 1):
        waiting = waiting or batches_of(texts, options.batch, rng)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(padded(waiting.pop()))
        value.backward()
        losses.append(value.item())
        nn.utils.clip_grad_norm_(learnt, 1.0)
        for optimizer, share in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = share * options.lr * _rate(update, options)
            optimizer.step()
            optimizer.zero_grad()
        if update % options.report == 0 or update == options.updates:
            with torch.autocast("cpu", torch.bfloat16):
                right = measure()
            record.append(
                {
                    "update": update,
                    "cpu_minutes": round((time.process_time() - started) / 60, 1),
                    "loss": round(sum(losses) / len(losses), 4),
                    "agreement": [round(r, 4) for r in right],
                }
            )
            losses = []
            log(", ".join(f"{name} {found}" for name, found in record[-1].items()))
    return record


def _rate(update: int, options: argparse.Namespace) -> float:
    """Rises over `warmup` updates, then falls along a cosine to a twentieth."""
    cosine = (1 + math.cos(math.pi * update / options.updates)) / 2
    return min(1.0, update / options.warmup) * (0.05 + 0.95 * cosine)


def batches_of(texts: Sequence[Text], tokens: int, rng: random.Random) -> list[list[Text]]:
    """In random order, each of texts of about one length, padded to at most `tokens` together."""
    batches: list[list[Text]] = []
    longest = 0
    for text in sorted(texts, key=lambda text: len(text.ids) + 16 * rng.random()):
        longest = max(longest, len(text.ids))
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = len(text.ids)
        batches[-1].append(text)
    rng.shuffle(batches)
    return batches


def padded(texts: Iterable[Text]) -> Batch:
    ids, features, last = zip(*texts, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        pad(ids, batch_first=True),
        pad(features, batch_first=True),
        pad(last, batch_first=True),
        torch.tensor([len(text) for text in ids]),
    )


def add_options(parser: argparse.ArgumentParser, updates: int, lr: float) -> None:
    add = parser.add_argument
    add("--work", default="build/train", help="folder where the answers are kept (%(default)s)")
    add("--model", help="folder or Hub id of a Llama (default: the packaged model)")
    add("--prompts", type=int, default=1300, help="%(default)s")
    add("--answer", type=int, default=160, help="tokens of an answer, at most (%(default)s)")
    add("--updates", type=int, default=updates, help="%(default)s")
    add("--batch", type=int, default=2048, help="tokens of a batch, with padding (%(default)s)")
    add("--lr", type=float, default=lr, help="%(default)s")
    add("--warmup", type=int, default=30, help="updates (%(default)s)")
    add("--report", type=int, default=100, help="updates between measurements (%(default)s)")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--threads", type=int, help="default: torch's own choice")


def what_counted(options: argparse.Namespace) -> dict[str, Any]:
    """Without where things lie and what they are called."""
    places = ("out", "work", "model", "threads", "name", "methods")
    return {key: value for key, value in vars(options).items() if key not in places}
