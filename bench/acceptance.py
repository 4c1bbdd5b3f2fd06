"""python -m bench acceptance [--method METHOD[:KEY=VALUE,...]] [--prompt NAME] [--json FILE]

Tokens per target forward (the bonus token counted, prefill not) on the demo's prompts, greedy in
fp32: in a first call, and in a second one that may draft from the first one's output. A method may
have options of `patch`: ngram:prompt_lookup_matches=1, or eagle3:model=PATH,draft_tree_topk=4. How
busy the machine is does not matter.

With --text FILE ... the files stand in for what a model would write, the first part of each as the
prompt: drafters without a model run through them in no time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

import specdec_kernels as sdk
from bench.replay import replay
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import CliError, Progress
from specdec_kernels.cli.options import method_with_options
from specdec_kernels.cli.prompts import PROMPTS
from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.config_checks import BY_MODEL
from specdec_kernels.drafting.factory import Sources, make_drafter, make_suffix_cache

METHODS = ("ngram", "ngram:prompt_lookup_matches=1", "suffix", "ngram+suffix", "suffix,ngram")
CALLS = 2
PROMPT_TOKENS = 500  # of a file, and at most half of it


class Call(NamedTuple):
    """What one call wrote, and the counts of `Metrics.snapshot`."""

    tokens: list[int]
    counts: dict[str, Any]


Workload = Callable[[Mapping[str, Any]], Iterator[Call]]  # CALLS calls with options of `patch`
Record = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    try:
        methods = {text: method_with_options(text) for text in args.method or METHODS}
        workloads = _files(args) if args.text else _prompts(args)
        with contextlib.ExitStack() as stack:
            output = None
            if args.json is not None:
                output = stack.enter_context(open(args.json, "w", encoding="utf-8"))
            sizes = {"num_speculative_tokens": args.num_speculative_tokens}
            methods = {name: {**sizes, **options} for name, options in methods.items()}
            records = list(_measure(methods, workloads, output))
    except (CliError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"bench acceptance: {error}", file=sys.stderr)
        return 2
    print(table(records))
    wrong = [r for r in records if not r["same_text"]]
    for r in wrong:
        print(f"{r['method']}, {r['prompt']}, call {r['call']}: another text", file=sys.stderr)
    return 1 if wrong else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m bench acceptance",
        description=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [prompt.name for prompt in PROMPTS]
    parser.add_argument("--method", action="append", metavar="METHOD", help="may be repeated")
    parser.add_argument("--prompt", action="append", choices=names, help="all unless given")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="in place of prompts")
    parser.add_argument("--model", metavar="PATH", help="the packaged one unless given")
    parser.add_argument("--num-speculative-tokens", type=int, default=8, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="one line per method, prompt and call")
    return parser.parse_args(argv)


def _prompts(args: argparse.Namespace) -> dict[str, Workload]:
    """The demo's prompts, as its model continues them."""
    model, tokenizer, _ = models.load(args.model, torch.float32, Progress(sys.stderr))
    model.generation_config.pad_token_id = tokenizer.eos_token_id

    def workload(text: str) -> Workload:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )

        def calls(options: Mapping[str, Any]) -> Iterator[Call]:
            with sdk.patched(model, options):
                for _ in range(CALLS):
                    sdk.metrics(model).reset()
                    tokens = model.generate(
                        **inputs, max_new_tokens=args.max_new_tokens, do_sample=False
                    )
                    yield Call(tokens[0].tolist(), sdk.metrics(model).snapshot())

        return calls

    chosen = [prompt for prompt in PROMPTS if args.prompt is None or prompt.name in args.prompt]
    return {prompt.name: workload(prompt.text) for prompt in chosen}


def _files(args: argparse.Namespace) -> dict[str, Workload]:
    """Files, cut into a prompt and an output of at most --max-new-tokens."""
    with models.quiet_transformers() as transformers:
        folder = args.model or str(models.packaged_checkpoint(Progress(sys.stderr)))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def workload(path: str) -> Workload:
        tokens = tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"]
        middle = min(PROMPT_TOKENS, len(tokens) // 2)
        if middle == 0:
            raise ValueError(f"--text: expected files of at least two tokens, got {path}")
        output = tokens[middle : middle + args.max_new_tokens]
        return lambda options: replayed(options, tokens[:middle], output, len(tokenizer))

    return {Path(path).name: workload(path) for path in args.text}


def replayed(
    options: Mapping[str, Any], prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> Iterator[Call]:
    config = SpeculativeConfig.make(options)
    if config.num_speculative_tokens is None or not set(BY_MODEL).isdisjoint(config.methods):
        raise ValueError(
            "--text: expected methods without a model and a number of speculative tokens, "
            f"got {config.method}"
        )
    cache = make_suffix_cache(config, vocab_size)
    for _ in range(CALLS):
        drafter = make_drafter(config, frozenset(), Sources(cache))
        counts = replay(drafter, prompt, output, config.num_speculative_tokens)
        yield Call([*prompt, *output], counts.snapshot())


def _measure(
    methods: Mapping[str, Mapping[str, Any]],
    workloads: Mapping[str, Workload],
    output: TextIO | None,
) -> Iterator[Record]:
    """One record per method, workload and call, written as it comes."""
    started, number = time.monotonic(), 0
    texts: dict[str, list[int]] = {}
    for method, options in methods.items():
        for prompt, calls in workloads.items():
            number += 1
            elapsed = time.monotonic() - started
            _say(f"[{elapsed:.0f} s] {number}/{len(methods) * len(workloads)}: {method}, {prompt}")
            for call, (tokens, counts) in enumerate(calls(options), 1):
                record = {
                    "method": method,
                    "options": {k: str(v) for k, v in options.items()},
                    "prompt": prompt,
                    "call": call,
                    "tokens_per_forward": counts["mean_acceptance_length"],
                    "acceptance_by_position": _by_position(counts),
                    "same_text": texts.setdefault(prompt, tokens) == tokens,
                    "counts": {k: v for k, v in counts.items() if k != "seconds"},
                }
                if output is not None:
                    output.write(json.dumps(record) + "\n")
                    output.flush()
                yield record
    _say("")


def _by_position(counts: Mapping[str, Any]) -> list[float]:
    """Share of drafts whose token i + 1 was kept."""
    return [round(n / counts["num_drafts"], 4) for n in counts["accepted_per_position"]]


def table(records: Iterable[Record]) -> str:
    """In Markdown: methods by prompts, with the calls' tokens per forward and their means."""
    rates: dict[str, dict[str, list[float]]] = {}
    for r in records:
        rates.setdefault(r["method"], {}).setdefault(r["prompt"], []).append(
            r["tokens_per_forward"]
        )
    prompts = list(dict.fromkeys(prompt for row in rates.values() for prompt in row))
    lines = [
        "| method | " + " | ".join(prompts) + " | geometric mean |",
        "| ------ |" + " ---: |" * (len(prompts) + 1),
    ]
    for method, row in rates.items():
        cells = [row[prompt] for prompt in prompts]
        means = [math.exp(math.fsum(map(math.log, c)) / len(c)) for c in zip(*cells, strict=True)]
        texts = [", ".join(f"{rate:.2f}" for rate in cell) for cell in (*cells, means)]
        lines.append(f"| `{method}` | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _say(text: str) -> None:
    """One line of progress that is rewritten, where someone watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
