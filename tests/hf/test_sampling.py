"""Sampling through generate under every rule: the exact joint distribution (A01, A02, A03)."""

import contextlib
import functools
import warnings

import pytest
import torch
import transformers
from sampling_cases import chi_square_pvalue
from tiny import Scripted, accelerated, batch, fresh, tiny
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import specdec_kernels as sdk

FALSE_ALARM = 1e-6
PENALTY_SEES_PADDING = int(transformers.__version__.split(".")[0]) < 5
V, NEW = 8, 4
SMALL = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
PROMPTS = [[1, 2, 3, 4, 1, 2], [5, 5, 6], [2, 3, 1, 4, 2, 3, 1, 7, 2, 3]]
WARPED = dict(temperature=0.8, top_k=6, top_p=0.9)
PLAIN = dict(top_k=0)
SETTINGS = {
    "plain": {},
    "warped": WARPED,
    "penalty": dict(penalty=2.5),
    "edited": dict(
        bias={(3,): 1.5, (5,): -1.0},
        penalty=1.7,
        suppress=[6],
        grammar=True,
        presence=1.0,
        frequency=0.8,
        temperature=0.7,
    ),
}


class Grammar(LogitsProcessor):
    """No token may follow the one that is one less, modulo V; by scores and by masks."""

    specdec_stateless = True

    def __call__(self, input_ids, scores):
        return scores.scatter(1, (input_ids[:, -1:] + 1) % V, -torch.inf)

    def allowed_tokens(self, input_ids):
        return (2**V - 1 - (1 << (input_ids[:, -1:] + 1) % V)).to(torch.int32)


class Occurrences(LogitsProcessor):
    """Presence and frequency penalties of the tokens behind `start`."""

    def __init__(self, presence, frequency, start):
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids, scores):
        counts = torch.nn.functional.one_hot(input_ids[:, self.start :], V).sum(1)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def warpers(
    start=0, bias=None, penalty=None, suppress=None, grammar=False, presence=0.0, frequency=0.0,
    temperature=1.0, top_k=0, top_p=1.0,
):  # fmt: skip
    """What generate builds from these settings, in its order; prompts end at `start`."""
    steps = LogitsProcessorList()
    if bias is not None:
        steps.append(SequenceBiasLogitsProcessor(bias))
    if penalty is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(penalty))
    if suppress is not None:
        steps.append(SuppressTokensLogitsProcessor(suppress))
    if grammar:
        steps.append(Grammar())
    steps.append(Occurrences(presence, frequency, start))
    if temperature != 1.0:
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    return steps


@torch.no_grad()
def exact_joint(model, prompt, **settings):
    """Probabilities of the next NEW tokens by enumeration, fp64 [V ** NEW]."""
    joint = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([prompt])
    padding = max(map(len, PROMPTS)) - len(prompt) if PENALTY_SEES_PADDING else 0
    steps = warpers(padding + len(prompt), **settings)
    for _ in range(NEW):
        logits = model(prefixes).logits[:, -1].float()
        seen = torch.nn.functional.pad(prefixes, (padding, 0))
        probabilities = steps(seen, logits).double().softmax(-1)
        joint = (joint[:, None] * probabilities).flatten()
        next_ = torch.arange(V).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(V, 0), next_], 1)
    return joint


def triples(joint):
    """The two joints of three consecutive tokens, [2, V ** 3]."""
    cube = joint.view([V] * NEW)
    return torch.stack([cube.sum(-1).flatten(), cube.sum(0).flatten()])


def draw(model, rows, **options):
    """Counts of every continuation, one row per prompt, in batches of ragged rows."""
    counts = torch.zeros(len(PROMPTS), V**NEW, dtype=torch.int64)
    copies = 700
    weights = V ** torch.arange(NEW - 1, -1, -1)
    for _ in range(rows // (copies * len(PROMPTS))):
        out = model.generate(
            **batch(PROMPTS),
            do_sample=True,
            max_new_tokens=NEW,
            num_return_sequences=copies,
            **options,
        )
        codes = (out[:, -NEW:] * weights).sum(1).view(len(PROMPTS), copies)
        for b, row in enumerate(codes):
            counts[b] += row.bincount(minlength=V**NEW)
    return counts


def pvalues(counts, joints):
    """Per triple, over the cells of all prompts together."""
    observed = torch.stack([triples(c) for c in counts]).transpose(0, 1)
    expected = torch.stack([triples(j) for j in joints]).transpose(0, 1)
    pairs = zip(observed.flatten(1), expected.flatten(1), strict=True)
    return [chi_square_pvalue(o, e / e.sum()) for o, e in pairs]


@pytest.fixture(scope="module")
def model():
    return fresh("llama", **SMALL)


@functools.cache
def joints(name, without=None):
    """Per prompt, for SETTINGS[name]; `without` leaves one of them out."""
    settings = {k: v for k, v in SETTINGS[name].items() if k != without}
    return [exact_joint(tiny("llama", **SMALL), prompt, **settings) for prompt in PROMPTS]


def siblings(offsets):
    """Trees of three siblings with children, chosen from the text alone."""

    def plan(b, text):
        first = [(text[-1] + i) % V for i in offsets]
        return [[t, (t + offsets[1]) % V, t] for t in first] + [[first[0], first[2]]]

    return plan


def chain(step):
    return lambda b, text: [[(text[-1] + step * i) % V for i in (1, 2, 3)]]


def draft(monkeypatch, drafts, offsets=(0, 1, 3)):
    if drafts != "lookup":
        plan = siblings(offsets) if drafts == "trees" else chain(offsets[1])
        monkeypatch.setattr("specdec_kernels.hf.generate.make_drafter", Scripted(plan))


LIKELY = (2, 5, 7)  # offsets that the edited model likes


@pytest.mark.parametrize(
    "name, drafts", [("warped", "lookup"), ("warped", "trees"), ("plain", "trees")]
)
def test_exact_joint(model, name, drafts, monkeypatch):
    draft(monkeypatch, drafts)
    torch.manual_seed(1)
    with accelerated(model, num_speculative_tokens=9) as metrics:
        counts = draw(model, 21_000, **(WARPED if name == "warped" else PLAIN))
    assert counts.sum() == 21_000
    assert 0.05 < metrics.acceptance_rate < 0.95
    assert min(pvalues(counts, joints(name))) > FALSE_ALARM
    if name == "warped":  # the test tells distributions apart
        assert max(pvalues(counts, joints("plain"))) < FALSE_ALARM


def edited(model):
    """The options of generate that stand for SETTINGS["edited"]."""
    edits = SETTINGS["edited"]
    model.generation_config.presence_penalty = edits["presence"]
    model.generation_config.frequency_penalty = edits["frequency"]
    return dict(
        sequence_bias=edits["bias"],
        repetition_penalty=edits["penalty"],
        suppress_tokens=edits["suppress"],
        logits_processor=[Grammar()],
        temperature=edits["temperature"],
        top_k=0,
    )


@pytest.mark.parametrize(
    "rule, drafts",
    [(rule, "trees") for rule in ("auto", "token", "recursive")] + [("block", "chains")],
)
def test_exact_joint_of_rules_with_penalties_biases_and_masks(rule, drafts, monkeypatch):
    """All in the kernel; leaving out any of them gives another distribution."""
    draft(monkeypatch, drafts, LIKELY)
    monkeypatch.delattr("specdec_kernels.hf.generate.WalkVerifier")
    model = fresh("llama", **SMALL)
    torch.manual_seed(2)
    with accelerated(model, num_speculative_tokens=9, rule=rule) as metrics:
        counts = draw(model, 8_400, **edited(model))
    assert metrics.num_accepted_tokens > 2_000
    assert min(pvalues(counts, joints("edited"))) > FALSE_ALARM
    for name in SETTINGS["edited"] if rule == "auto" else ():
        assert min(pvalues(counts, joints("edited", without=name))) < FALSE_ALARM


def test_exact_joint_through_processors(model):
    """The walk that calls the processors token by token, for rows of many lengths at once."""
    torch.manual_seed(2)
    with accelerated(model, num_speculative_tokens=4) as metrics:
        own = [LogitNormalization()]
        counts = draw(model, 6_300, repetition_penalty=2.5, logits_processor=own, **PLAIN)
    assert metrics.num_accepted_tokens > 0
    assert min(pvalues(counts, joints("penalty"))) > FALSE_ALARM
    assert min(pvalues(counts, joints("plain"))) < FALSE_ALARM


def frozen_history(monkeypatch):
    monkeypatch.setattr("specdec_kernels.decoding.history.TokenHistory.push", lambda *args: None)


def masks_of_the_root(monkeypatch):
    from specdec_kernels.hf.grammar import TreeMasks

    original = TreeMasks.__call__

    def root_only(self, rows, tree, vocab):
        words = original(self, rows, tree, vocab)
        return words if tree is None else words[:, :1].expand_as(words).contiguous()

    monkeypatch.setattr(TreeMasks, "__call__", root_only)


@pytest.mark.parametrize("break_it", [frozen_history, masks_of_the_root], ids=lambda f: f.__name__)
def test_negative_control_of_edits(break_it, monkeypatch):
    break_it(monkeypatch)
    draft(monkeypatch, "trees", LIKELY)
    model = fresh("llama", **SMALL)
    with accelerated(model, num_speculative_tokens=9):
        counts = draw(model, 4_200, **edited(model))
    with contextlib.suppress(AssertionError):  # what is forbidden was drawn
        assert min(pvalues(counts, joints("edited"))) > FALSE_ALARM
        pytest.fail("looks right")


def test_negative_control_of_shared_noise(model, monkeypatch):
    """The same random numbers at every position."""
    from specdec_kernels.ops import rejection_sample

    def shared(logits, ids, parents, num_nodes, sampling, **options):
        sampling = sampling._replace(position=torch.full_like(sampling.position, 6))
        return rejection_sample(logits, ids, parents, num_nodes, sampling, **options)

    monkeypatch.setattr("specdec_kernels.decoding.verify.rejection_sample", shared)
    with accelerated(model, num_speculative_tokens=1):
        counts = draw(model, 10_500, **PLAIN)
    assert min(pvalues(counts, joints("plain"))) < FALSE_ALARM


def test_negative_control_of_the_lossy_rule(model, monkeypatch):
    """`typical` says so once, draws from something else, and is exact when greedy."""
    draft(monkeypatch, "trees")
    with warnings.catch_warnings(record=True) as caught, sdk.patched(model, rule="typical"):
        warnings.simplefilter("always")
        counts = draw(model, 4_200, **PLAIN) + draw(model, 2_100, **PLAIN)
        text = model.generate(**batch(PROMPTS), do_sample=False, max_new_tokens=20)
    ours = [str(w.message) for w in caught if "specdec_kernels" in str(w.message)]
    assert len(ours) == 1 and "rule 'typical' is lossy" in ours[0]
    assert min(pvalues(counts, joints("plain"))) < FALSE_ALARM
    assert torch.equal(text, model.generate(**batch(PROMPTS), do_sample=False, max_new_tokens=20))
