"""`specdec doctor --draft`: whether a draft checkpoint fits its target, and is read rightly."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels.cli import draft_checks as checks
from specdec_kernels.cli import draft_description as description
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import Progress, format_table, write_json
from specdec_kernels.cli.draft_checks import Check
from specdec_kernels.cli.draft_conventions import (
    LINEAR,
    Convention,
    Conventions,
    Drafter,
    Measurement,
    compare,
    measure,
)
from specdec_kernels.cli.generate import encode, new_token_limit, read_prompt
from specdec_kernels.cli.options import DTYPES, threads
from specdec_kernels.cli.prompts import PROMPTS
from specdec_kernels.hf.checkpoint import read_checkpoint
from specdec_kernels.hf.dflash import DFlash, fit_dflash, read_dflash
from specdec_kernels.hf.draft import load_draft
from specdec_kernels.hf.eagle import Eagle, fit_eagle
from specdec_kernels.hf.features import BEFORE_NORM
from specdec_kernels.hf.medusa import load_heads
from specdec_kernels.hf.mtp import load_mtp
from specdec_kernels.hf.support import support

NEW_TOKENS, DRAFTED = 64, 3
HARDLY = 0.2  # share of first tokens below which drafting cannot pay
COVERED = 0.9
FLAGS = ("norm_before_residual", "norm_output", "hidden_first")


@dataclass
class Case:
    """What is examined, and what was found so far."""

    source: str
    target: Any
    kind: str | None = None
    checkpoint: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    drafter: Drafter | None = None

    def read(self) -> None:
        """Fills the fields. What keeps the draft from loading becomes a check."""
        reason = support(self.target).reason
        if reason:
            self.checks.append(Check("target", "error", reason))
            return
        try:
            self.kind = description.kind_of(self.source, self.target)
            self._read(self.kind)
        except Exception as error:  # a damaged checkpoint fails in too many ways to list
            reason = " ".join(str(error).split()).removeprefix("model: ")
            if not isinstance(error, (ValueError, TypeError)):
                reason = f"{type(error).__name__}: {reason}"
            self.checks.append(Check("load", "error", reason))

    def _read(self, kind: str) -> None:
        if kind == "draft_model":
            draft = load_draft(self.source, self.target, LINEAR)
            self.checkpoint = description.describe_model(draft)
            self.checks += checks.check_model(draft, self.target)
            self.drafter = draft
        elif kind == "medusa":
            heads = load_heads(self.source, self.target, LINEAR)
            self.checkpoint = description.describe_medusa(heads)
            self.checks += checks.check_medusa(self.source, heads, self.target)
            self.drafter = heads
        elif kind in ("dflash", "dspark"):
            self.config, weights = read_dflash(self.source)
            dflash = fit_dflash(self.config, weights, kind, self.target, LINEAR)
            self.checkpoint = description.describe_dflash(dflash, self.config)
            self.checks += checks.check_dflash(self.config, weights, dflash, self.target)
            self.drafter = dflash
        elif kind == "mtp":
            layers = load_mtp(self.source, self.target, LINEAR)
            self.checkpoint = description.describe_mtp(layers)
            self.checks += checks.check_mtp(layers, self.target)
            self.drafter = layers
        else:
            self.config, weights = read_checkpoint(self.source)
            self.checkpoint = description.describe_eagle(self.config, weights)
            head = fit_eagle(self.config, weights, kind, self.target, LINEAR)
            self.checks += checks.check_eagle(self.config, weights, head, self.target)
            self.drafter = head


def run(args: argparse.Namespace) -> int:
    progress = Progress()
    asked = args.prompt is not None or args.file is not None
    texts = [read_prompt(args)] if asked else [prompt.text for prompt in PROMPTS]
    with threads(args.threads):
        dtype = DTYPES[args.dtype or "bf16"]
        target, tokenizer, name = models.load(args.target, dtype, progress, "--target")
        with models.quiet_transformers():
            case = Case(args.draft, target)
            case.read()
        inputs = [encode(tokenizer, text, raw=False) for text in texts]
        limit = args.max_new_tokens or NEW_TOKENS
        prompts = [(x, new_token_limit(target, x["input_ids"].shape[1], limit)) for x in inputs]
        drafted = args.num_speculative_tokens or DRAFTED
        found = _measured(case, prompts, drafted, progress)
    report = {
        "draft": args.draft,
        "target": name,
        "kind": case.kind,
        "checkpoint": case.checkpoint,
        "checks": [check._asdict() for check in case.checks],
        "num_prompts": len(prompts),
        "num_speculative_tokens": drafted,
        **found,
        "passed": all(check.status != "error" for check in case.checks),
    }
    if args.json:
        write_json(report, args.json)
    if args.json != "-":
        print("\n".join(_lines(report)))
    return 0 if report["passed"] else 1


def _measured(
    case: Case, prompts: list[tuple[dict[str, Any], int]], drafted: int, progress: Progress
) -> dict[str, Any]:
    """Rows of the table, the best of them and the change that makes the loader read so."""
    if case.drafter is None:
        return {"conventions": [], "best": None, "remedy": None}
    assert case.kind is not None
    conventions, kind = Conventions(case.drafter, case.target), case.kind

    def try_out(way: Convention) -> Measurement:
        with progress.ticking(f"drafting, {conventions.name(way)}"):
            return measure(case.target, kind, conventions.read(way), drafted, prompts)

    measured, best = compare(conventions, try_out)
    remedy = None
    if best != Convention():
        changes = conventions.remedy(best, case.config)
        remedy = {"config": changes, "complete": best.has_settings}
        rates = [measured[way].tokens_per_forward for way in (best, Convention())]
        case.checks.append(_misread(conventions.name(best), rates, remedy))
    else:
        case.checks.append(_acceptance(measured[best]))
    case.checks += _coverage(case.drafter, measured[best])
    rows = [_row(conventions, way, result) for way, result in measured.items()]
    return {"conventions": rows, "best": conventions.name(best), "remedy": remedy}


def _row(conventions: Conventions, way: Convention, result: Measurement) -> dict[str, Any]:
    flags = {name: value != (name in way.flipped) for name, value in conventions.settings.items()}
    return {
        "convention": conventions.name(way),
        "hidden_layers": [
            "before norm" if k == BEFORE_NORM else k for k in conventions.layers(way)
        ],
        **{name: flags.get(name) for name in FLAGS},
        "num_drafts": result.num_drafts,
        "accepted_per_position": result.accepted,
        "tokens_per_forward": result.tokens_per_forward,
    }


def _misread(name: str, rates: list[float], remedy: dict[str, Any]) -> Check:
    settings = ", ".join(f"{key}: {_json(value)}" for key, value in remedy["config"].items())
    detail = f"read {name}, it gives {rates[0]:.2f} tokens per forward, as loaded {rates[1]:.2f}"
    if settings:
        detail += f"; in config.json set {settings}"
    if not remedy["complete"]:
        detail += "; no setting of config.json asks for all of that"
    return Check("convention", "error", detail)


def _json(value: Any) -> str:
    return str(value).lower()


def _acceptance(result: Measurement) -> Check:
    if not result.num_drafts:
        return Check("acceptance", "warning", "nothing was drafted: give a longer text to write")
    first = result.accepted[0]
    detail = f"{first:.0%} of first tokens, {result.tokens_per_forward:.2f} tokens per forward"
    if first < HARDLY:
        detail += ": hardly any; was it trained for this target, and for such prompts?"
        return Check("acceptance", "warning", detail)
    return Check("acceptance", "ok", detail)


def _coverage(drafter: Drafter, result: Measurement) -> list[Check]:
    """How much of the text the draft vocabulary can say."""
    ids = None
    if isinstance(drafter, (Eagle, DFlash)):
        ids = (drafter.head if isinstance(drafter, Eagle) else drafter.network).target_ids
    tokens = [token for text in result.tokens for token in text]
    if ids is None or not tokens:
        return []
    known = set(ids.tolist())
    share = sum(token in known for token in tokens) / len(tokens)
    status = "ok" if share >= COVERED else "warning"
    return [Check("coverage", status, f"{share:.0%} of the written tokens can be drafted")]


def _lines(report: dict[str, Any]) -> list[str]:
    facts = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in report["checkpoint"].items()
        if value is not None
    )
    lines = [
        f"draft    {report['draft']}: {report['kind'] or 'unknown'}" + (f", {facts}" * bool(facts)),
        f"target   {report['target']}",
    ]
    lines += [f"{c['status']:8} {c['name']}: {c['detail']}" for c in report["checks"]]
    if report["conventions"]:
        lines += ["", *_table(report)]
    return lines


def _table(report: dict[str, Any]) -> list[str]:
    drafted = report["num_speculative_tokens"]
    header = ["convention", "hidden states", *(f"token {i + 1}" for i in range(drafted))]
    rows = []
    for row in report["conventions"]:
        states = map(str, row["hidden_layers"])
        shares = (f"{share:.0%}" for share in row["accepted_per_position"])
        rate = f"{row['tokens_per_forward']:.2f}"
        rows.append([row["convention"], ", ".join(states), *shares, rate])
    number = report["num_prompts"]
    prompts = "1 prompt" if number == 1 else f"{number} prompts"
    return [
        f"accepted of {drafted} drafted tokens, greedy, {prompts}:",
        format_table([*header, "tokens/forward"], rows),
        f"best: {report['best']}",
    ]
