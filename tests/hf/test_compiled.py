"""Verify forwards through torch.compile: the same text, and no compilation because of lengths."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens, random_rows, use_drafter, wrong

import specdec_kernels as sdk
from specdec_kernels.hf import compiled
from specdec_kernels.hf.model import CachedModel, Runner
from specdec_kernels.tree import DraftTree


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Dynamo's tracing without a compiler behind it."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_compiled_forwards_give_the_same_text(name):
    model = fresh(name)
    rows = lookup_rows(model)
    expected = new_tokens(model, batch(rows))
    with accelerated(model, compile=True) as metrics:
        before = compilations()
        assert new_tokens(model, batch(rows)) == expected
    assert metrics.num_accepted_tokens > 0
    assert compilations() > before


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_text(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    model = fresh(num_hidden_layers=1)
    rows = lookup_rows(model, lens=(9,))
    expected = new_tokens(model, batch(rows))
    with accelerated(model, compile=True, num_speculative_tokens=3) as metrics:
        assert new_tokens(model, batch(rows)) == expected
    assert metrics.num_accepted_tokens > 0


def test_lengths_never_cause_a_compilation(monkeypatch):
    model = fresh(num_hidden_layers=1)
    lens = []

    def plan(b, text):
        lens.append(len(text))
        return [[wrong(t) for t in text[-3:]]]

    use_drafter(monkeypatch, plan)
    rows = random_rows([5, 9])
    with accelerated(model, compile=True, num_speculative_tokens=3):
        new_tokens(model, batch(rows), max_new_tokens=10)
        before = compilations()
        new_tokens(model, batch(rows), max_new_tokens=60)
        new_tokens(model, batch(random_rows([40, 77])), max_new_tokens=60)
        assert compilations() == before
    assert len(set(lens)) > 60


def test_one_compilation_per_batch_and_width(monkeypatch):
    monkeypatch.setattr("specdec_kernels.cache.GROWTH", 8)
    model = fresh(num_hidden_layers=1)
    sizes = [n for n in (3, 0, 1, 2, 7, 6, 5, 4, 12, 15) for _ in range(4)]

    def plan(b, text):
        return [[wrong(t) for t in text[-1:] * sizes[len(text) % len(sizes)]]]

    drafter = use_drafter(monkeypatch, plan)
    with accelerated(model, compile=True, num_speculative_tokens=15):
        before = compilations()
        new_tokens(model, batch(random_rows([5])), max_new_tokens=100)
    widths = {1 << depth.bit_length() for (depth,) in drafter.sizes}
    assert widths == {1, 2, 4, 8, 16}
    assert compilations() - before == len(widths)


def test_a_model_that_cannot_be_compiled_runs_as_it_is(monkeypatch):
    model = fresh(num_hidden_layers=1)
    kind = type(model.model)

    def forward(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return kind.forward(self, *args, **kwargs)

    namespace = {"forward": forward, "__module__": kind.__module__}
    model.model.__class__ = type(kind.__name__, (kind,), namespace)
    rows = lookup_rows(model)
    expected = new_tokens(model, batch(rows))
    with warnings.catch_warnings(record=True) as caught, sdk.patched(model, compile=True):
        warnings.simplefilter("always")
        assert new_tokens(model, batch(rows)) == expected
    (text,) = [str(w.message) for w in caught if str(w.message).startswith("specdec_kernels")]
    assert "verify forwards are not compiled: Unsupported" in text


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"compile": 1}, TypeError, "compile: expected True or False, got 1"),
        (
            {"compile": True, "linear": "invariant"},
            ValueError,
            "compile: expected False with linear='invariant'",
        ),
    ],
)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        sdk.patch(fresh(), **options)


def test_features_are_caught_in_compiled_forwards():
    model = fresh()
    seen = {}
    ids = torch.tensor(random_rows([12]))
    for compile in (False, True):
        runner = Runner(model, "off", "off", compile)
        run = CachedModel(model, runner, 1, 100, torch.device("cpu"), pytest.fail, [1, 2])
        with torch.no_grad():
            run.prefill_by(lambda inputs: model(input_ids=ids, **inputs), [12])
            for tokens in ([5, 6, 7], [5, 6, 8], [9, 6], [7, 7, 8, 9], [4, 4]):
                tree = DraftTree.from_lists([tokens], [list(range(-1, len(tokens) - 1))])
                logits = run.forward(tree).clone()
                seen.setdefault(compile, []).append((logits, run.features.clone()))
    for ours, plain in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert compilations() <= 2
