"""Verify forwards as recordings: a double of the CUDA graph replays on the CPU, where it may read
nothing but the buffers."""

from __future__ import annotations

import sys
import warnings
from typing import ClassVar

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens

import specdec_kernels as sdk
from specdec_kernels.cache import RaggedKV
from specdec_kernels.hf import graphs, steps
from specdec_kernels.hf.buffers import WindowBuffers
from specdec_kernels.hf.features import FeatureTap
from specdec_kernels.tree import DraftTree


class Poison:
    """What a replay must not read."""

    def __iter__(self):
        raise AssertionError("a replay has read numbers of the host's")


class Recording:
    """As a CUDA graph: recording computes nothing, and replaying sees only what stays in place."""

    device_type = "cpu"
    made: ClassVar[list[Recording]] = []
    originals: ClassVar[list] = []

    def __init__(self, call, device, earlier):
        assert earlier is None or earlier in self.made
        call()
        self.call, self.outputs, self.replays = call, call(), 0
        for tensor in self.outputs:
            if tensor is not None:
                tensor.fill_(float("nan"))
        self.made.append(self)

    def replay(self):
        self.replays += 1
        for mine, new in zip(self.outputs, self.call(), strict=True):
            if mine is not None:
                mine.copy_(new)
        for put_back in reversed(self.originals):
            put_back()
        self.originals.clear()
        return self.outputs


@pytest.fixture
def recorded(monkeypatch):
    """Makes models on the CPU record; returns the recordings."""
    monkeypatch.setattr(graphs, "CudaGraph", Recording)
    monkeypatch.setattr(Recording, "made", [])
    monkeypatch.setattr(Recording, "originals", [])
    init, fill, run = WindowBuffers.__init__, WindowBuffers.fill, steps.Steps._run

    def remembering(self, kv, width):
        init(self, kv, width)
        self.kv = kv

    def poisoning(self, tree):
        fill(self, tree)
        if not self.ready:
            return
        for tensor in (x for x in tree[:5] if x is not None):
            copy = tensor.clone()
            tensor.fill_(-77)
            Recording.originals.append(lambda tensor=tensor, copy=copy: tensor.copy_(copy))
        lens, self.kv.lens = self.kv.lens, Poison()
        Recording.originals.append(lambda: setattr(self.kv, "lens", lens))

    def running(self, tree, width):
        known = self.recordings.by_width.get(width, (None,))[0]
        for buffers in {*self._buffers.values(), known} - {None}:
            buffers.ready = buffers is known
        return run(self, tree, width)

    monkeypatch.setattr(WindowBuffers, "ready", False, raising=False)
    monkeypatch.setattr(WindowBuffers, "__init__", remembering)
    monkeypatch.setattr(WindowBuffers, "fill", poisoning)
    monkeypatch.setattr(steps.Steps, "_run", running)
    return Recording.made


def widths(recordings):
    return [r.outputs[0].shape[1] for r in recordings]


# ---- generation


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "opt", "deepseek_v3"])
def test_recorded_forwards_give_the_same_text(recorded, name):
    model = fresh(name)
    rows = lookup_rows(model)
    expected = new_tokens(model, batch(rows))
    with accelerated(model) as metrics:
        assert new_tokens(model, batch(rows)) == expected
    assert metrics.num_accepted_tokens > 0
    assert recorded and sum(r.replays for r in recorded) > 3
    assert sorted(set(widths(recorded))) == sorted(widths(recorded))


def test_recordings_are_made_once_and_outlive_the_run(recorded):
    model = fresh()
    rows = lookup_rows(model)
    with accelerated(model, num_speculative_tokens=3):
        first = new_tokens(model, batch(rows))
        new_tokens(model, batch(rows))  # the first run's first forwards were compared, not recorded
        made = list(recorded)
        assert new_tokens(model, batch(rows)) == first
        assert recorded == made
        assert new_tokens(model, batch(rows[:1])) == first[:1]
    assert widths(recorded[len(made) :]) and recorded[-1].outputs[0].shape[0] == 1


def test_a_cache_that_grows_is_recorded_anew(recorded, monkeypatch):
    monkeypatch.setattr("specdec_kernels.cache.GROWTH", 8)
    model = fresh()
    rows = lookup_rows(model)
    expected = new_tokens(model, batch(rows), max_new_tokens=90)
    with accelerated(model, num_speculative_tokens=3):
        assert new_tokens(model, batch(rows), max_new_tokens=90) == expected
    again = [w for w in widths(recorded) if widths(recorded).count(w) > 1]
    assert again


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.register_parameter(
            "weight", torch.nn.Parameter(model.lm_head.weight.detach().clone())
        ),
        lambda model: setattr(model.lm_head, "__class__", type("Foreign", (torch.nn.Linear,), {})),
    ],
    ids=["weights", "code"],
)
def test_recordings_are_not_used_for_a_model_that_may_have_changed(recorded, change):
    model = fresh()
    rows = lookup_rows(model)
    with accelerated(model, num_speculative_tokens=3, linear="off"):
        change(model)
        first = new_tokens(model, batch(rows))
        new_tokens(model, batch(rows))
        made = len(recorded)
        change(model)
        assert new_tokens(model, batch(rows)) == first
    assert len(set(widths(recorded))) == len(recorded) - made


def test_two_runs_at_once_do_not_share_recordings(recorded):
    shelf = graphs.Shelf()
    kept = graphs.Recordings(RaggedKV(1, 10, torch.device("cpu")), graphs.state_of(fresh()))
    kept.by_width[1] = (None, None)
    model = fresh()
    kept.state = graphs.state_of(model)
    shelf.put(model, kept)
    assert shelf.take(model, 1, 20) is kept and kept.kv.max_slots == 20
    assert shelf.take(model, 1, 20) is None


def test_features_come_from_the_recording_too(recorded):
    model = fresh()
    rows = lookup_rows(model)
    from specdec_kernels.hf.model import CachedModel, Runner

    seen = {}
    for mode in ("off", "auto"):
        run = CachedModel(
            model, Runner(model, "auto", mode), 1, 100, torch.device("cpu"), pytest.fail, [1, 2]
        )
        ids = torch.tensor(rows[:1])
        with torch.no_grad():
            run.prefill_by(lambda inputs, ids=ids: model(input_ids=ids, **inputs), [len(rows[0])])
            for tokens in ([5, 6, 7], [5, 6, 8], [9, 6]):
                tree = DraftTree.from_lists([tokens], [list(range(-1, len(tokens) - 1))])
                logits = run.forward(tree).clone()
                seen.setdefault(mode, []).append((logits, run.features))
    assert sum(r.replays for r in recorded) == 2
    for ours, plain in zip(seen["auto"], seen["off"], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


# ---- where it is not right


def warned(recorded, model, **options):
    rows = lookup_rows(model)
    expected = new_tokens(model, batch(rows))
    with warnings.catch_warnings(record=True) as caught, sdk.patched(model, **options):
        warnings.simplefilter("always")
        assert new_tokens(model, batch(rows)) == expected
        assert new_tokens(model, batch(rows)) == expected
    ours = [str(w.message) for w in caught if str(w.message).startswith("specdec_kernels")]
    assert not any(r.replays for r in recorded)
    return ours


def test_a_model_with_hooks_is_not_recorded(recorded):
    model = fresh()
    calls = []
    model.lm_head.register_forward_hook(lambda *args: calls.append(1))
    (text,) = warned(recorded, model)
    assert "not recorded: hooks of lm_head (Linear) would not run" in text
    assert calls and not recorded


def test_hooks_of_another_run_do_not_count():
    model = fresh()
    with FeatureTap(model, [1, 2]).caught():
        assert graphs.why_not_recorded(model) is None
        model.lm_head.register_forward_pre_hook(lambda *args: None)
        assert graphs.why_not_recorded(model) == "hooks of lm_head (Linear) would not run"


def test_a_forward_on_the_instance_is_not_recorded(recorded):
    model = fresh()
    model.lm_head.forward = type(model.lm_head).forward.__get__(model.lm_head)
    (text,) = warned(recorded, model)
    assert "lm_head (Linear) has a forward of its own" in text


def test_a_model_that_counts_with_the_length_is_not_recorded(recorded):
    model = fresh()
    decoder, kind = model.model, type(model.model)

    def forward(self, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache.get_seq_length() > 1000:  # no text here is as long
            kwargs["position_ids"] = kwargs["position_ids"] + 1 + kwargs["position_ids"] % 3
        return kind.forward(self, *args, **kwargs)

    # The class keeps its name and module, by which transformers finds things.
    namespace = {"forward": forward, "__module__": kind.__module__}
    decoder.__class__ = type(kind.__name__, (kind,), namespace)
    (text,) = warned(recorded, model)
    assert "counts with the cache's length" in text


def test_a_recording_that_fails_leaves_the_plain_forwards(recorded, monkeypatch):
    def refuse(self, call, device, earlier):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recording, "__init__", refuse)
    (text,) = warned(recorded, fresh())
    assert "RuntimeError: operation not permitted when stream is capturing" in text


def test_nothing_is_recorded_on_a_cpu_or_when_off(monkeypatch):
    monkeypatch.setattr(graphs.CudaGraph, "__init__", lambda *args: pytest.fail("recorded"))
    model = fresh()
    rows = lookup_rows(model)
    for options in ({}, {"graphs": "off"}):
        with accelerated(model, **options):
            new_tokens(model, batch(rows))
    with pytest.raises(ValueError, match="graphs: expected"):
        sdk.patch(model, graphs="on")


def test_costs_of_steps_that_prepare_are_not_learnt(recorded):
    model = fresh()
    rows = lookup_rows(model)
    with accelerated(model, num_speculative_tokens=3) as metrics:
        new_tokens(model, batch(rows))
        costs = sys.modules["specdec_kernels.hf.patch"]._engines[model].costs
    measured = sum(len(s) for s in costs._samples.values())
    assert 0 < measured <= metrics.num_steps - len(recorded) - 1
