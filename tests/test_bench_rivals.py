"""Each benchmark's smallest case is right, and the rivals that draw keep the distribution."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from sampling_cases import FALSE_ALARM, chi_square_pvalue

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from bench import __main__ as cli
from bench import harness, torch_sampling, windows
from bench.harness import Options
from specdec_kernels import native
from specdec_kernels.ops.rejection_sample import reference as rejection

pytestmark = pytest.mark.skipif(native.cpu is None, reason="no CPU kernels to measure")


@pytest.mark.parametrize("name", cli.available())
def test_the_smallest_case_of_each_benchmark_is_right(name):
    cases = list(importlib.import_module(f"bench.bench_{name}").cases(Options(quick=True)))
    assert all("dtype" in case.shape for case in cases)
    case = min(cases, key=lambda case: case.bytes)
    with torch.inference_mode():
        inputs = case.make(0)
        harness.check(name, case, {"cpu": case.run}, inputs)
        if case.facts is not None:
            assert set(case.facts([case.run(inputs)])) == set(harness.OUTCOME)


def test_trees_are_pairs_of_siblings():
    parents = windows.parents_of({"rule": "recursive", "T": 9})
    assert parents == [-1, 0, 0, 1, 1, 3, 3, 5, 5]
    assert windows.parents_of({"rule": "token", "T": 4}) == [-1, 0, 1, 2]


SHAPES = [
    {"rule": "coupled", "draft": "one-hot", "T": 3},
    {"rule": "token", "draft": "logits", "T": 3},
    {"rule": "recursive", "draft": "logits", "T": 4},
    {"rule": "block", "draft": "logits", "T": 3},
]


def same_logits_everywhere(window):
    def repeated(logits):
        return logits[:1].expand_as(logits).contiguous()

    window = window._replace(logits=repeated(window.logits))
    if window.draft_logits is not None:
        window = window._replace(draft_logits=repeated(window.draft_logits))
        children = windows.children_of(window.parents[0].tolist())
        windows.draw_children(window.tokens, window.draft_logits, children, window.sampling.seed)
    return window


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["rule"])
def test_the_sampling_rivals_are_lossless(shape, monkeypatch):
    monkeypatch.setattr(torch_sampling, "CHUNK", 1 << 20)
    torch.manual_seed(0)
    rows, vocab = 20_000, 5
    shape = {"B": rows, "V": vocab, "dtype": "fp32", "temperature": 1.0, **shape}
    window = same_logits_everywhere(windows.make(0, shape))
    module = importlib.import_module("bench.bench_rejection_sample")
    emitted = module.rivals(shape)["torch_batched"](window)
    target = torch.softmax(window.logits[0, 0].double(), -1)
    counts = torch.bincount(emitted.tokens[:, 0], minlength=vocab)
    assert chi_square_pvalue(counts, target) > FALSE_ALARM
    rule = "token" if shape["rule"] == "coupled" else shape["rule"]
    module.plausible(emitted, module.ours(window, rule), window)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 3}, {"top_p": 0.7}])
def test_the_sampling_rival_draws_from_the_kept_set(settings, monkeypatch):
    monkeypatch.setattr(torch_sampling, "CHUNK", 1 << 20)
    torch.manual_seed(0)
    row = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    sampling = windows.sampling_of(settings, 1, 0)
    kept = rejection.prepare(row[None], *sampling[:4]).kept[0]
    scores = torch.where(kept, row.double() / settings.get("temperature", 1.0), -torch.inf)
    drawn = torch_sampling.sample(row.expand(20_000, 5).contiguous(), settings)
    counts = torch.bincount(drawn, minlength=5)
    assert chi_square_pvalue(counts, torch.softmax(scores, -1)) > FALSE_ALARM
