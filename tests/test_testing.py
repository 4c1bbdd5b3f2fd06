"""The shipped test suite: it passes what is sound, and fails what is not."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import specdec_kernels
from specdec_kernels.ops.rejection_sample import reference
from specdec_kernels.testing import (
    FILTERS,
    NEGATIVE_CONTROLS,
    Check,
    Decoder,
    Drafts,
    Filters,
    InvalidAcceptance,
    Report,
    ToyModel,
    check_acceptance,
    check_sampler,
    gumbel_draws,
    plain_verify,
)
from specdec_kernels.testing.__main__ import main
from specdec_kernels.testing.decoder import propose
from specdec_kernels.testing.plain import FAULTS
from specdec_kernels.tree import Acceptance

RULES = ("auto", "coupled", "token", "recursive", "block")
TEMPERATURE = {"temperature": FILTERS["temperature"]}


def sound(rule):
    return partial(plain_verify, rule=rule)


# ---- the verifier that the controls spoil

CASES = [
    ("token", Drafts.chain(2, filters=Filters(temperature=1.3, top_k=3))),
    ("token", Drafts((-1, 0, 0, 1, 2), sampled=False)),
    ("recursive", Drafts((-1, 0, 0, 1, 2, 0), filters=Filters(bias=(1.0, -1.0, 0.0, 0.5)))),
    ("recursive", Drafts((-1, 0, 0, 0), filters=Filters(top_k=2))),
    ("block", Drafts.chain(3)),
    ("block", Drafts.chain(3, sampled=False)),
    ("coupled", Drafts((-1, 0, 0, 1, 2))),
]


@pytest.mark.parametrize("rule, drafts", CASES)
@pytest.mark.parametrize("setting", FILTERS)
def test_seed_gives_the_verifier_what_it_gives_the_reference(rule, drafts, setting):
    rows, target = 120, ToyModel(4, 1)
    draw = partial(gumbel_draws, rule=rule)
    case = Decoder(target, target.draft_of(0.6, 2), drafts, FILTERS[setting], draw)
    text = case.start(torch.arange(rows), 8)
    window = propose(drafts, case.draft, text, draw)
    for i, token in enumerate((-1, 4, 2**40)):  # ids from elsewhere, in the last slot of some rows
        window.draft_token_ids[i::9, -1] = token
    args = (
        target.logits(window.before, window.draft_token_ids).double(),
        *window[1:4],
        text.sampling(case.filters, 4),
    )
    draft = None if window.draft_logits is None else window.draft_logits.double()
    expected = reference.rejection_sample(*args, draft, None, rule)
    check_acceptance(expected, window, 4)
    found = plain_verify(*args, draft_logits=draft, rule=rule)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("rule", RULES)
def test_joint_passes_without_a_fault(rule):
    report = check_sampler(sound(rule), rule=rule, rows=10_000)
    assert report.passed, str(report)


# ---- negative controls


@pytest.mark.parametrize("name", NEGATIVE_CONTROLS)
def test_negative_control(name):
    """Fails, with a margin: nowhere near what a sound sampler does once in a million runs."""
    report = NEGATIVE_CONTROLS[name].run()
    assert not report.passed
    assert report.smallest_pvalue < 1e-30, str(report)


def test_negative_controls_are_complete():
    assert set(FAULTS) <= set(NEGATIVE_CONTROLS)
    assert {"raw_draft_logits", "shared_noise", "frozen_counters"} <= set(NEGATIVE_CONTROLS)
    with pytest.raises(ValueError, match=r"expected a known rule and fault, got 'token', 'x'"):
        NEGATIVE_CONTROLS["stale_siblings"].verify.func(*[None] * 5, rule="token", fault="x")


def failing(report):
    return {check.name.split(": ")[1].split(" of ")[0] for check in report.failures}


def test_negative_control_of_each_check():
    """Each check fails where it is the one to see."""
    options = {"rule": "token", "windows": ["sampled chain"], "rows": 40_000}
    options["filters"] = TEMPERATURE

    def verify(fault):
        return partial(plain_verify, rule="token", fault=fault)

    report = check_sampler(verify("accepts_on_equality"), **options)
    assert failing(report) == {"impossible drafts"}
    report = check_sampler(verify("bonus_from_accept_coin"), **options)
    assert "bonus token given acceptance" in failing(report)
    assert "recovered token given rejection" not in failing(report)
    draw = NEGATIVE_CONTROLS["shared_noise"].options["draw"]
    report = check_sampler(sound("token"), draw=draw, **options)
    assert "recovered token given rejection" in failing(report)
    assert "acceptance rate" not in failing(report)
    report = check_sampler(sound("coupled"), **options)
    assert failing(report) == {"acceptance rate", "recovered token given rejection"}


def test_negative_control_sampler_that_depends_on_the_batch():
    def verify(*args, draft_logits):
        sampling = args[-1]
        rows = torch.arange(len(sampling.seed))
        keyed = (*args[:-1], sampling._replace(seed=sampling.seed * 1000 + rows))
        return plain_verify(*keyed, draft_logits=draft_logits, rule="token")

    options = {"rule": "token", "windows": ["sampled chain"], "rows": 5000}
    assert failing(check_sampler(verify, **options)) == {"seed alone decides"}
    assert check_sampler(verify, seeded=False, **options).passed


# ---- samplers of others


def leviathan(target_logits, ids, parents, num_nodes, sampling, *, draft_logits):
    """A sampler as many are written: softmax, torch's generator, chains."""
    target = torch.softmax(target_logits / sampling.temperature[:, None, None], -1)
    draft = torch.softmax(draft_logits, -1)
    rows, width = ids.shape
    count, alive = torch.zeros(rows).int(), torch.ones(rows).bool()
    for slot in range(1, width):
        p, q = (x[torch.arange(rows), slot - 1, ids[:, slot]] for x in (target, draft))
        alive &= (torch.rand(rows) * q < p) & (slot < num_nodes)
        count += alive
    at = (torch.arange(rows), count.long())
    rejected = (count < num_nodes - 1)[:, None]
    residual = (target[at] - draft[at]).clamp(min=0)
    weights = torch.where(rejected, residual, target[at])
    out = torch.full_like(ids, -1)
    slots = torch.arange(width)
    out[:, :-1] = torch.where(slots[1:] <= count[:, None], ids[:, 1:], -1)
    out[at] = torch.multinomial(weights, 1)[:, 0]
    path = torch.where(slots <= count[:, None], slots, -1).int()
    return Acceptance(path, count, out, torch.zeros_like(count))


def test_joint_of_a_sampler_with_random_state():
    torch.manual_seed(0)
    for rule in (None, "token"):
        report = check_sampler(
            leviathan, rule=rule, windows=["sampled chain"], rows=30_000, filters=TEMPERATURE,
            seeded=False,
        )  # fmt: skip
        assert report.passed, str(report)
    report = check_sampler(leviathan, windows=["sampled chain"], rows=5000, filters=TEMPERATURE)
    assert failing(report) == {"seed alone decides"}


def spoilt(change):
    def verify(*args, draft_logits):
        result = plain_verify(*args, draft_logits=draft_logits, rule="token")
        return result._replace(**change(result))

    return verify


SPOILT = {
    "num_accepted": lambda r: {"num_accepted": r.num_accepted + 1},
    "output tokens": lambda r: {"output_token_ids": torch.full_like(r.output_token_ids, -1)},
    "vocabulary": lambda r: {"output_token_ids": r.output_token_ids * 5},
    "root": lambda r: {"path": r.path + 1},
    "path": lambda r: {"path": torch.full_like(r.path, -1)},
    "drafts' tokens": lambda r: {"output_token_ids": r.output_token_ids.clamp(max=0)},
}


@pytest.mark.parametrize("what", SPOILT)
def test_negative_control_contradictions(what):
    report = check_sampler(spoilt(SPOILT[what]), windows=["sampled chain"], rows=500)
    assert failing(report) == {"acceptance"}
    assert "expected" in report.failures[0].detail and "for drafts" in report.failures[0].detail


def test_acceptance_of_a_tree_follows_parents():
    target = ToyModel(4, 1)
    drafts = Drafts((-1, 0, 0, 1), sampled=False)
    case = Decoder(target, target, drafts, Filters(), gumbel_draws)
    window = propose(drafts, target, case.start(torch.arange(1), 8), gumbel_draws)
    ids = window.draft_token_ids[0].tolist()
    good = Acceptance(
        torch.tensor([[0, 1, 3, -1]]),
        torch.tensor([2]),
        torch.tensor([[ids[1], ids[3], 0, -1]]),
        torch.zeros(1),
    )
    check_acceptance(good, window, 4)
    bad = good._replace(
        path=torch.tensor([[0, 2, 3, -1]]), output_token_ids=torch.tensor([[ids[2], ids[3], 0, -1]])
    )
    with pytest.raises(InvalidAcceptance, match="a path along parents"):
        check_acceptance(bad, window, 4)


def test_joint_on_windows_of_ones_own():
    windows = {"deep": Drafts.chain(5), "uneven": Drafts((-1, 0, 0, 1), sampled=False)}
    report = check_sampler(sound("recursive"), windows=windows, rows=2000, filters=TEMPERATURE)
    assert report.passed, str(report)
    assert {check.name.split(":")[0].split(",")[0] for check in report.checks} == set(windows)


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match=r"check_sampler: expected rule as one of .*'typical'"):
        check_sampler(leviathan, rule="typical")
    with pytest.raises(ValueError, match=r"expected windows out of .*sampled tree.*got 'tree'"):
        check_sampler(leviathan, windows=["tree"])


# ---- report and command line


def test_report_divides_the_false_alarm():
    checks = [Check("a", 1e-6), Check("b", 0.5), Check.of("c", True, "fine")]
    report = Report(tuple(checks))
    assert report.limit == 5e-7 and report.passed and report.smallest_pvalue == 1e-6
    worse = Report((*checks, Check.of("d", False, "why")))
    assert [check.name for check in worse.failures] == ["d"]
    assert str(worse).splitlines()[3].startswith("FAIL  d") and "why" in str(worse)
    assert str(report).splitlines()[-1].startswith("0 of 3 checks failed")
    assert not Report((Check("a", 1e-7),)).passed


def test_command_line(capsys):
    assert main(["--rule", "token", "--backend", "plain", "--rows", "3000"]) == 0
    assert "0 of 18 checks failed" in capsys.readouterr().out
    assert main(["--controls", "--rows", "100"]) == 1
    assert "a control was not seen" in capsys.readouterr().out


def test_imports_torch_alone():
    code = """
import sys
for name in ("scipy", "numpy", "transformers", "hypothesis", "triton", "specdec_kernels._cpu"):
    sys.modules[name] = None
from functools import partial
from specdec_kernels.testing import check_sampler, plain_verify
assert check_sampler(partial(plain_verify, rule="token"), rule="token", rows=500).passed
"""
    root = str(Path(specdec_kernels.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})
