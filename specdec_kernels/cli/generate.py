"""Write an answer, streamed, with the accepted draft tokens coloured."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import torch

import specdec_kernels as sdk
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import (
    GREEN,
    RESET,
    CliError,
    Progress,
    check_json_target,
    use_colour,
    write_json,
)
from specdec_kernels.cli.options import (
    DTYPES,
    add_common,
    add_drafting,
    add_json,
    patch_options,
    real,
    threads,
    whole,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--file", metavar="PATH", help="read the prompt from a file ('-': stdin)")
    parser.add_argument("--raw", action="store_true", help="no chat template around the prompt")
    parser.add_argument("--max-new-tokens", type=whole(1), default=256, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    add_common(parser)
    add_drafting(parser)
    group = parser.add_argument_group("sampling (greedy unless --temperature is given)")
    group.add_argument("--temperature", type=real(0), metavar="T")
    group.add_argument("--top-k", type=whole(1), metavar="K")
    group.add_argument("--top-p", type=real(0, 1, above=True), metavar="P")
    group.add_argument("--min-p", type=real(0, 1), metavar="P")
    group.add_argument("--seed", type=whole(0, 2**63 - 1), metavar="S")
    add_json(parser, "write text, tokens, speed and metrics as JSON instead of streaming")


def run(args: argparse.Namespace) -> int:
    check_json_target(args.json)
    options, sampling = patch_options(args), _sampling(args)
    prompt = read_prompt(args)
    with threads(args.threads):
        model, tokenizer, _ = models.load(args.model, DTYPES[args.dtype], Progress())
        inputs = encode(tokenizer, prompt, args.raw)
        limit = new_token_limit(model, inputs["input_ids"].shape[1], args.max_new_tokens)
        streamer = None if args.json else ColourStreamer(tokenizer, sys.stdout, args.color)
        result = _generate(model, tokenizer, inputs, limit, streamer, options, sampling, args.seed)
    if args.json:
        write_json(result, args.json)
    else:
        print(_summary(result), file=sys.stderr)
    return 0


class ColourStreamer:
    """A transformers streamer; text of tokens that come through `put_accepted` is coloured."""

    def __init__(self, tokenizer: Any, stream: TextIO, colour: str = "auto") -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.colours = use_colour(colour, stream)
        self.tokens: list[int] = []
        self.start = self.read = 0  # a window of context, so that pieces join as the whole would
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
        else:
            self._push(value, accepted=False)

    def put_accepted(self, value: torch.Tensor) -> None:
        self._push(value, accepted=True)

    def end(self) -> None:
        self._write(final=True, accepted=False)
        print(file=self.stream, flush=True)

    def _push(self, value: torch.Tensor, accepted: bool) -> None:
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self._write(final=False, accepted=accepted)

    def _write(self, final: bool, accepted: bool) -> None:
        before = self._decode(self.tokens[self.start : self.read])
        text = self._decode(self.tokens[self.start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return  # the bytes of a character are still incomplete
        piece = text[len(before) :]
        self.start, self.read = self.read, len(self.tokens)
        if piece:
            coloured = f"{GREEN}{piece}{RESET}" if accepted and self.colours else piece
            print(coloured, end="", file=self.stream, flush=True)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of generate()."""
    names = ("top_k", "top_p", "min_p")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.temperature:
        return {"do_sample": True, "temperature": args.temperature, "top_k": 0, **given}
    if given or args.seed is not None:
        flag = "--" + (next(iter(given)) if given else "seed").replace("_", "-")
        raise CliError(f"{flag} needs sampling: add --temperature T with T above 0")
    return {"do_sample": False}


def read_prompt(args: argparse.Namespace) -> str:
    if args.file is None:
        text = args.prompt
    elif args.file == "-":
        text = sys.stdin.read()
    else:
        try:
            with open(args.file, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise CliError(
                f"cannot read {args.file}: {error.strerror}; give --file a readable text file"
            ) from error
        except UnicodeDecodeError as error:
            raise CliError(f"{args.file} is not UTF-8 text: convert it first") from error
    if not text.strip():
        raise CliError("the prompt is empty: give --prompt some text, or --file a file with some")
    return text


def encode(tokenizer: Any, prompt: str, raw: bool) -> dict[str, torch.Tensor]:
    if not raw and tokenizer.chat_template:
        return dict(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        )
    encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise CliError("the prompt has no tokens: give --prompt some text this tokenizer knows")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def new_token_limit(model: Any, prompt_tokens: int, wanted: int) -> int:
    allowed = models.context_length(model)
    if allowed is None:
        return wanted
    if prompt_tokens >= allowed:
        raise CliError(
            f"the prompt has {prompt_tokens} tokens and the model allows {allowed}, the answer "
            "included: shorten the prompt"
        )
    if prompt_tokens + wanted > allowed:
        left = allowed - prompt_tokens
        print(f"specdec: the model's {allowed} tokens leave room for {left} new", file=sys.stderr)
        return left
    return wanted


def _generate(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, torch.Tensor],
    limit: int,
    streamer: ColourStreamer | None,
    options: dict[str, Any],
    sampling: dict[str, Any],
    seed: int | None,
) -> dict[str, Any]:
    """Generates and returns the JSON answer; metrics is None for --method plain."""
    plain = options["method"] == "plain"
    with contextlib.ExitStack() as stack:
        if not plain:
            try:
                stack.enter_context(sdk.patched(model, **options))
            except (ValueError, TypeError) as error:
                raise CliError(f"{error} (see specdec generate --help)") from error
        if seed is not None:
            torch.manual_seed(seed)
        start = time.perf_counter()
        with models.quiet_transformers():
            output = model.generate(**inputs, max_new_tokens=limit, streamer=streamer, **sampling)
        seconds = time.perf_counter() - start
        metrics = None if plain else sdk.metrics(model).snapshot()
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "new_tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
        "metrics": metrics,
    }


def _summary(result: dict[str, Any]) -> str:
    line = (
        f"{result['new_tokens']} tokens in {result['seconds']:.1f} s "
        f"({result['tokens_per_second']:.1f} tokens/s)"
    )
    metrics = result["metrics"]
    if metrics is None:
        return f"[{line}]"
    return (
        f"[{line}, {metrics['mean_acceptance_length']:.2f} tokens a forward, "
        f"{metrics['num_accepted_tokens']} of {metrics['num_draft_tokens']} drafts accepted]"
    )
