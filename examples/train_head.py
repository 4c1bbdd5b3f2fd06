"""Trains an EAGLE-3 head and an MTP layer for a Llama, from the model's own answers.

    python examples/train_head.py --out examples/heads

For the packaged SmolLM2-135M-Instruct that is its answers to 1,300 prompts, its hidden states while
it reads them, and both heads, in 90 minutes of one core. The answers are kept in --work, where an
interrupted run and train_draft.py find them. `patch(model, method=..., model=folder)` loads a head.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from distill import Text, log, own_states, own_texts
from fitting import add_options, batches_of, fit, held_out, padded, what_counted
from networks import NETWORKS, STEPS, hidden_layers
from torch import Tensor
from unrolled import Batch, agreement, loss

from specdec_kernels.cli.console import Progress
from specdec_kernels.cli.model import load

DECAY = 0.8
MEASURED_STEPS = 4


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    target, tokenizer, name = load(options.model, torch.bfloat16, Progress(sys.stderr))
    target.requires_grad_(False)
    ids = own_texts(target, tokenizer, options)
    draft_ids = frequent(ids, options.draft_vocab_size, tokenizer.eos_token_id)
    texts = own_states(target, ids, hidden_layers(target), options)
    about = {
        "target": name,
        "texts": len(ids),
        "tokens": sum(map(len, ids)),
        "torch": torch.__version__,
        "options": what_counted(options),
    }
    for method in options.methods:
        network = NETWORKS[method](target, draft_ids)
        learnt = sum(p.numel() for p in network.parameters() if p.requires_grad)
        log(f"{method}: {learnt:,} parameters")
        own = texts if network.config.fused else [t._replace(features=t.last) for t in texts]
        record = train(network, target, own, STEPS[method], options)
        folder = options.out / f"{options.name}-{method}"
        network.save(folder, target)
        (folder / "training.json").write_text(json.dumps(about | {"log": record}, indent=1) + "\n")
        log(f"{method}: written to {folder}")


def frequent(texts: Sequence[Tensor], number: int, eos: int) -> Tensor:
    """The ids that occur most often, rising, and the end of text among them: int64 [number]."""
    counts = torch.cat(list(texts)).bincount()
    total = int(counts.sum())
    counts[eos] = total
    most = counts.topk(number)
    covered = (int(most.values.sum()) - total) / total
    log(f"{number} of {int((counts > 0).sum())} tokens are {covered:.1%} of the texts")
    return most.indices.sort().values


def train(
    network: Any, target: Any, texts: list[Text], steps: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What was measured on the way: `agreement` of steps, on texts that were held out."""
    weight = target.get_output_embeddings().weight
    reduced = weight[network.target_ids]
    shown, held = held_out(texts)

    def measure() -> list[float]:
        return agreement(
            network,
            map(padded, batches_of(held, options.batch, random.Random(0))),
            MEASURED_STEPS,
            lambda out: network.target_ids[network.logits(out).argmax(-1)],
            lambda last: (last @ weight.T).argmax(-1),
        )

    def loss_of(batch: Batch) -> Tensor:
        return loss(network, batch, steps, DECAY, network.logits, lambda last: last @ reduced.T)

    return fit(network, network.learnt_tables, shown, loss_of, measure, options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the heads")
    add("--name", default="smollm2-135m", help="what their folders' names begin with (%(default)s)")
    add("--methods", nargs="+", choices=sorted(NETWORKS), default=["eagle3", "mtp"])
    add("--draft-vocab-size", type=int, default=4096, help="%(default)s")
    add_options(parser, updates=900, lr=0.01)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
