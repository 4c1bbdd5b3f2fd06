"""Sampling through generate: the exact joint distribution, and what a seed means (A01, A02)."""

import pytest
import torch
import transformers
from sampling_cases import chi_square_pvalue
from tiny import Scripted, accelerated, batch, fresh, lookup_rows, new_tokens, random_rows
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

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


def warpers(penalty=None, temperature=1.0, top_k=0, top_p=1.0):
    """What generate builds from these settings, in its order."""
    steps = LogitsProcessorList()
    if penalty is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(penalty))
    if temperature != 1.0:
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    return steps


@torch.no_grad()
def exact_joint(model, prompt, steps):
    """Probabilities of the next NEW tokens by enumeration, fp64 [V ** NEW]."""
    joint = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([prompt])
    padding = max(map(len, PROMPTS)) - len(prompt) if PENALTY_SEES_PADDING else 0
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


@pytest.fixture(scope="module")
def joints(model):
    return {
        name: [exact_joint(model, prompt, warpers(**settings)) for prompt in PROMPTS]
        for name, settings in (("warped", WARPED), ("plain", {}), ("penalty", {"penalty": 2.5}))
    }


def siblings(b, text):
    """Trees of three siblings with children, chosen from the text alone."""
    first = [(text[-1] + i) % V for i in (0, 1, 3)]
    return [[t, (t + 1) % V, t] for t in first] + [[first[0], first[2]]]


@pytest.mark.parametrize(
    "name, drafts", [("warped", "lookup"), ("warped", "trees"), ("plain", "trees")]
)
def test_exact_joint(model, joints, name, drafts, monkeypatch):
    if drafts == "trees":
        monkeypatch.setattr("specdec_kernels.hf.generate.make_drafter", Scripted(siblings))
    torch.manual_seed(1)
    with accelerated(model, num_speculative_tokens=9) as metrics:
        counts = draw(model, 21_000, **(WARPED if name == "warped" else PLAIN))
    assert counts.sum() == 21_000
    assert 0.05 < metrics.acceptance_rate < 0.95
    assert min(pvalues(counts, joints[name])) > FALSE_ALARM
    other = joints["plain" if name == "warped" else "warped"]
    if name == "warped":  # the test tells distributions apart
        assert max(pvalues(counts, other)) < FALSE_ALARM


def test_exact_joint_through_processors(model, joints):
    """The walk that calls the processors token by token."""
    torch.manual_seed(2)
    with accelerated(model, num_speculative_tokens=4) as metrics:
        counts = draw(model, 6_300, repetition_penalty=2.5, **PLAIN)
    assert metrics.num_accepted_tokens > 0
    assert min(pvalues(counts, joints["penalty"])) > FALSE_ALARM
    assert min(pvalues(counts, joints["plain"])) < FALSE_ALARM


def test_shared_noise_would_be_seen(model, joints, monkeypatch):
    """Negative control: the same random numbers at every position."""
    from specdec_kernels.ops import rejection_sample

    def shared(logits, ids, parents, num_nodes, sampling, **options):
        sampling = sampling._replace(position=torch.full_like(sampling.position, 6))
        return rejection_sample(logits, ids, parents, num_nodes, sampling, **options)

    monkeypatch.setattr("specdec_kernels.decoding.verify.rejection_sample", shared)
    with accelerated(model, num_speculative_tokens=1):
        counts = draw(model, 10_500, **PLAIN)
    assert min(pvalues(counts, joints["plain"])) < FALSE_ALARM


@pytest.fixture(scope="module")
def larger():
    return fresh("phi3")


SETTINGS = [
    dict(temperature=0.7, top_k=0),
    dict(temperature=0.6, top_k=30, top_p=0.95),
    dict(temperature=0.6, top_k=0, min_p=0.02),
    dict(temperature=0.35, top_k=0, typical_p=0.9),
    dict(temperature=0.5, top_k=20, repetition_penalty=1.05),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_seed_means_one_text(larger, settings):
    """A29: whatever the batch, the padding, the size of the tree, and with drafting off."""
    rows = lookup_rows(larger)
    seeds = (11, 12, 13)
    options = dict(do_sample=True, max_new_tokens=32, **settings)

    def texts(chosen, extra=None, **config):
        inputs = batch([rows[b] for b in chosen] + ([extra] if extra else []))
        config["seed"] = tuple(seeds[b] for b in chosen) + ((99,) if extra else ())
        with accelerated(larger, **config) as metrics:
            out = new_tokens(larger, inputs, **options)
        drafted.append(metrics.num_accepted_tokens)
        return out[: len(chosen)]

    drafted = []
    expected = texts((0, 1, 2), method="none")
    assert len({tuple(t) for t in expected}) == 3
    for size in (1, 3, 8, None):
        assert texts((0, 1, 2), num_speculative_tokens=size) == expected
    assert texts((2, 0), num_speculative_tokens=8) == [expected[2], expected[0]]
    for b in range(3):
        assert texts((b,)) == [expected[b]]
    long = random_rows((90,))[0]
    assert texts((0, 1, 2), extra=long, num_speculative_tokens=3) == expected
    assert drafted[0] == 0 and sum(drafted) > 0


def test_scores_do_not_change_the_text(larger):
    """The kernel's warpers and transformers' own keep the same tokens."""
    inputs = batch(lookup_rows(larger))
    options = dict(do_sample=True, temperature=1.3, top_k=25, top_p=0.97)
    with accelerated(larger, seed=5):
        expected = new_tokens(larger, inputs, **options)
        out = larger.generate(
            **inputs,
            max_new_tokens=48,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    assert out.sequences[:, inputs["input_ids"].shape[1] :].tolist() == expected


def test_torch_seeds_govern(larger):
    inputs = batch(lookup_rows(larger))
    options = dict(do_sample=True, temperature=1.5)
    outs = []
    with accelerated(larger):
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append([new_tokens(larger, inputs, **options) for _ in range(2)])
    assert outs[0] == outs[1] != outs[2]
    assert outs[0][0] != outs[0][1]  # the next call goes on
    with accelerated(larger, seed=7):
        outs = [new_tokens(larger, inputs, **options) for _ in range(2)]
    assert outs[0] == outs[1]
    with accelerated(larger, seed=(7, 8, 9)):
        assert new_tokens(larger, inputs, **options) == outs[0]


def test_the_edges_of_the_settings(larger):
    """A08, A25: more tokens asked for than there are, one kept, none below the largest."""
    inputs = batch(lookup_rows(larger))
    greedy = new_tokens(larger, inputs)
    with accelerated(larger, num_speculative_tokens=8):
        for settings in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0), dict(temperature=1e-6)):
            options = dict(do_sample=True, **{"top_k": 0, **settings})
            assert new_tokens(larger, inputs, **options) == greedy
        out = new_tokens(larger, inputs, do_sample=True, top_k=500, temperature=50.0)
        banned = {(t,): -1000.0 for t in range(2, 90)}
        few = new_tokens(larger, inputs, do_sample=True, top_k=0, sequence_bias=banned)
    assert all(0 <= t < 96 for row in out for t in row) and len(set(out[0])) > 20
    assert {t for row in few for t in row} <= {0, 1, *range(90, 96)}
