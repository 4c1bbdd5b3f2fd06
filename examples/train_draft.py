"""Trains a small Llama that drafts for a larger one, from the larger one's own answers.

    python examples/train_draft.py --out draft

The draft reads the target's tokens; its table of tokens begins as the target's, cut down to the
directions that matter most. The answers are those of train_head.py, and are kept like them.
`patch(model, method="draft_model", model="draft")` loads what is written.
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
from networks import rope_theta
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from unrolled import Batch

from specdec_kernels.cli.console import Progress
from specdec_kernels.cli.model import load


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    target, tokenizer, name = load(options.model, torch.bfloat16, Progress(sys.stderr))
    target.requires_grad_(False)
    ids = own_texts(target, tokenizer, options)
    draft, record = train(target, own_states(target, ids, (), options), options)
    draft.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    about = {
        "target": name,
        "texts": len(ids),
        "tokens": sum(map(len, ids)),
        "torch": torch.__version__,
        "options": what_counted(options),
        "log": record,
    }
    (options.out / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    log(f"written to {options.out}")


def train(
    target: Any, texts: Sequence[Text], options: argparse.Namespace
) -> tuple[LlamaForCausalLM, list[dict[str, Any]]]:
    """The draft, and what was measured on the way: `agreement` on texts that were held out."""
    draft = small_llama(target, options)
    log(f"draft: {draft.num_parameters():,} parameters")
    weight = target.get_output_embeddings().weight
    shown, held = held_out(texts)

    def loss(batch: Batch) -> Tensor:
        found, last = _both(draft, batch)
        with torch.no_grad():
            wanted = (last @ weight.T).float().softmax(-1)
        return -(wanted * found.float().log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def measure() -> list[float]:
        same = total = 0
        for batch in map(padded, batches_of(held, options.batch, random.Random(0))):
            found, last = _both(draft, batch)
            same += int((found.argmax(-1) == (last @ weight.T).argmax(-1)).sum())
            total += len(found)
        return [same / max(total, 1)]

    return draft, fit(draft, [draft.lm_head.weight], shown, loss, measure, options)


def _both(draft: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """The draft's logits [N, V] and the target's states [N, d], of all tokens in the batch."""
    inside = torch.arange(batch.ids.shape[1]) < batch.lens[:, None]
    hidden = draft.model(batch.ids).last_hidden_state
    return draft.lm_head(hidden[inside]), batch.last[inside]


def small_llama(target: Any, options: argparse.Namespace) -> LlamaForCausalLM:
    """With tied tables: the target's in its `hidden_size` directions of largest spread."""
    text, size = target.config.get_text_config(), options.hidden_size
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=rope_theta(text),
        tie_word_embeddings=True,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
    )
    draft = LlamaForCausalLM(config)
    table = target.get_input_embeddings().weight.float()
    directions = torch.linalg.eigh(table.T @ table).eigenvectors[:, -size:]
    draft.lm_head.weight.data.copy_(table @ directions)
    return draft


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the draft")
    add("--hidden-size", type=int, default=192, help="at most the target's (%(default)s)")
    add("--heads", type=int, default=3, help="%(default)s")
    add("--layers", type=int, default=4, help="%(default)s")
    add_options(parser, updates=900, lr=0.01)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
