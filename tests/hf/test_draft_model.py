"""A smaller model as the source of guesses, through generate."""

import copy

import pytest
import torch
from test_sampling import (
    FALSE_ALARM,
    PLAIN,
    PROMPTS,
    SMALL,
    WARPED,
    draw,
    exact_joint,
    joints,
    pvalues,
)
from tiny import VOCAB, accelerated, batch, fresh, new_tokens, random_rows, tiny

from specdec_kernels.drafting.draft_model import DraftModelDrafter
from specdec_kernels.hf.draft import DraftRun


def noisy(model, share, seed=0):
    """A copy whose weights are off: it agrees with the model now and then."""
    out = copy.deepcopy(model)
    g = torch.Generator().manual_seed(seed)
    for parameter in out.parameters():
        noise = torch.randn(parameter.shape, generator=g) * parameter.std()
        if parameter.numel() > 1:
            parameter.data.add_(share * noise)
    return out


DRAFTS = {
    "itself": lambda name: fresh(name),
    "near": lambda name: noisy(tiny(name), 0.05),
    "other": lambda name: fresh("qwen3" if name != "qwen3" else "llama"),
}


@pytest.mark.parametrize("options", [{}, dict(draft_tree_topk=3)], ids=["chain", "tree"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_greedy_text_is_that_of_the_target(name, draft, options):
    """B01, B15, C21: one row and ragged ones, rotary and learned positions, sliding windows."""
    target = fresh(name)
    rows = random_rows((3, 9, 21), seed=1)
    for inputs in (batch(rows[1:2]), batch(rows)):
        expected = new_tokens(target, inputs)
        for size in (5, None):
            with accelerated(
                target, model=DRAFTS[draft](name), num_speculative_tokens=size, **options
            ) as metrics:
                assert new_tokens(target, inputs) == expected
            if size is not None:
                assert metrics.num_draft_tokens > 0
            if draft == "itself" and not options:
                assert metrics.num_draft_tokens == metrics.num_accepted_tokens


@pytest.mark.parametrize("k", [*range(1, 8), 20])
def test_b01_a_prompt_of_one_token(k):
    target = fresh("llama")
    draft = noisy(target, 0.05)
    for prompt in ([[10]], [[10], [4, 5]]):
        expected = new_tokens(target, batch(prompt), max_new_tokens=60)
        with accelerated(target, model=draft, num_speculative_tokens=k):
            assert new_tokens(target, batch(prompt), max_new_tokens=60) == expected


@pytest.mark.parametrize("topk", [1, 3])
def test_b05_the_target_itself_drafts_for_200_tokens(topk, monkeypatch):
    """Always right, but in every third round, whose drafts are spoilt; the cache stays level."""
    target = fresh("llama")
    inputs = batch(random_rows((3, 9, 14), seed=2))
    expected = new_tokens(target, inputs, max_new_tokens=200)
    rounds = []

    class Spoilt(DraftModelDrafter):
        def propose(self, tokens, lens, *args):
            tree = super().propose(tokens, lens, *args)
            if len(rounds) % 3 == 2:
                tree.draft_token_ids[:, 1:] = 2 + (tree.draft_token_ids[:, 1:] + 1) % 90
            rounds.append((tree, lens.tolist()))
            return tree

        def commit(self, decision, features):
            super().commit(decision, features)
            (tree, lens), kept = rounds[-1], decision.num_kept
            have = self.model.kv.lens
            assert all(0 <= n + k - h <= 2 for n, k, h in zip(lens, kept, have, strict=True) if k)
            rounds[-1] = (tree.drafted_depth(), decision.num_accepted)

    monkeypatch.setattr("specdec_kernels.drafting.factory.DraftModelDrafter", Spoilt)
    options = dict(num_speculative_tokens=4 if topk == 1 else 8, draft_tree_topk=topk)
    with accelerated(target, model=fresh("llama"), **options):
        assert new_tokens(target, inputs, max_new_tokens=200) == expected
    assert len(rounds) > 20
    for i, (drafted, accepted) in enumerate(rounds):
        for most, right in zip(drafted, accepted, strict=True):
            if right >= 0 and i % 3 != 2:  # the best path need not be the tree's longest
                assert right == most if topk == 1 else right >= min(most, 1)


@pytest.mark.parametrize("topk", [1, 3])
def test_b10_logits_of_draft_nodes_are_those_of_their_paths(topk, monkeypatch):
    """Each forward of the draft model, against the model on the row's text alone."""
    target, draft = fresh("llama"), fresh("gemma3_text")
    rows = random_rows((3, 9, 14), seed=3)
    new = new_tokens(target, batch(rows), max_new_tokens=24)
    texts = [row + tokens for row, tokens in zip(rows, new, strict=True)]
    read = [dict(enumerate(text)) for text in texts]  # per row, by position; chains overwrite
    differences, forward = [], DraftRun.forward

    def checked(self, tree):
        lens, logits = list(self.kv.lens), forward(self, tree)
        for b, nodes in enumerate(tree.num_nodes.tolist()):
            prefix = [read[b][i] for i in range(lens[b])]
            for slot in range(nodes):
                path, at = [], slot
                while at >= 0:
                    path.insert(0, int(tree.draft_token_ids[b, at]))
                    at = int(tree.parents[b, at])
                alone = draft(input_ids=torch.tensor([prefix + path])).logits[0, -1]
                differences.append(float((alone - logits[b, slot]).abs().max()))
            if topk == 1:
                read[b].update(enumerate(tree.draft_token_ids[b, :nodes].tolist(), lens[b]))
        return logits

    with accelerated(target, model=draft, num_speculative_tokens=6, draft_tree_topk=topk):
        monkeypatch.setattr(DraftRun, "forward", checked)
        assert new_tokens(target, batch(rows), max_new_tokens=24) == new
    assert len(differences) > 200 and max(differences) < 2e-4


SAMPLED = dict(
    greedy=dict(draft_sample_method="greedy"),
    tree=dict(draft_sample_method="greedy", draft_tree_topk=2, num_speculative_tokens=5),
    drawn=dict(draft_sample_method="probabilistic"),
)


@pytest.mark.parametrize(
    "name, rule, settings",
    [
        ("greedy", "coupled", "plain"),
        ("greedy", "token", "warped"),
        ("greedy", "block", "warped"),
        ("drawn", "coupled", "warped"),
        ("drawn", "auto", "plain"),
        ("drawn", "token", "warped"),
        ("drawn", "block", "warped"),
        ("tree", "auto", "plain"),
        ("tree", "token", "warped"),
    ],
)
def test_a01_a02_a03_exact_joint(name, rule, settings):
    model = fresh("llama", **SMALL)
    torch.manual_seed(4)
    options = {"num_speculative_tokens": 3, "rule": rule, **SAMPLED[name]}
    with accelerated(model, model=noisy(model, 0.2), **options) as metrics:
        counts = draw(model, 8_400, **(WARPED if settings == "warped" else PLAIN))
    assert 0.05 < metrics.acceptance_rate < 0.98
    assert min(pvalues(counts, joints(settings))) > FALSE_ALARM


def test_negative_control_of_the_draft_logits(monkeypatch):
    """Drafts drawn at a temperature, and the logits before it handed over."""
    original = DraftModelDrafter._next

    def raw(self, logits, sampling, depth, drawn):
        token, law = original(self, logits, sampling, depth, drawn)
        return token, None if law is None else logits.float()

    monkeypatch.setattr(DraftModelDrafter, "_next", raw)
    model = fresh("llama", **SMALL)
    options = dict(draft_sample_method="probabilistic", rule="token", num_speculative_tokens=3)
    with accelerated(model, model=noisy(model, 0.2), **options):
        counts = draw(model, 4_200, temperature=0.4, top_k=0)
    exact = [exact_joint(model, prompt, temperature=0.4) for prompt in PROMPTS]
    assert min(pvalues(counts, exact)) < FALSE_ALARM


def test_a29_coupled_text_does_not_depend_on_the_drafter():
    target = fresh("phi3")
    inputs = batch(random_rows((3, 9, 14), seed=5))
    edits = dict(repetition_penalty=1.1, top_k=40)
    for extra in ({}, edits, dict(no_repeat_ngram_size=4)):
        options = dict(do_sample=True, temperature=0.6, max_new_tokens=32, **extra)
        with accelerated(target, seed=7, method="none"):
            expected = new_tokens(target, inputs, **options)
        rates = {}
        for name, given in SAMPLED.items():
            for which, draft in (("same", fresh("phi3")), ("near", noisy(target, 0.05))):
                given = {"num_speculative_tokens": 3, **given}
                with accelerated(target, seed=7, rule="coupled", model=draft, **given) as metrics:
                    assert new_tokens(target, inputs, **options) == expected
                rates[which, name] = metrics.acceptance_rate
        if not extra:
            assert rates["same", "drawn"] == 1 > rates["same", "greedy"]
            assert rates["near", "drawn"] > rates["near", "greedy"] > 0


@pytest.mark.parametrize("topk", [1, 3])
def test_d01_c22_eos_inside_drafts(topk):
    """At every place of a block, also where only the draft model says it."""
    target = fresh("llama")
    inputs = batch(random_rows((9, 4), seed=6))
    text = new_tokens(target, inputs, max_new_tokens=24)[0]
    for draft in (fresh("llama"), noisy(target, 0.05)):
        for eos in ([text[pos]] for pos in range(1, 16, 2)):
            expected = new_tokens(target, inputs, eos_token_id=eos)
            with accelerated(target, model=draft, num_speculative_tokens=6, draft_tree_topk=topk):
                assert new_tokens(target, inputs, eos_token_id=eos) == expected


def test_c22_a_draft_model_that_always_says_eos():
    target, draft = fresh("llama"), fresh("llama")
    torch.nn.init.zeros_(draft.lm_head.weight)
    inputs = batch(random_rows((9, 4), seed=6))
    expected = new_tokens(target, inputs)
    eos = next(t for t in range(2, VOCAB) if not any(t in row for row in expected))
    bias = 9.0 * torch.nn.functional.one_hot(torch.tensor(eos), VOCAB)
    draft.lm_head.bias = torch.nn.Parameter(bias)
    with accelerated(target, model=draft, num_speculative_tokens=4) as metrics:
        assert new_tokens(target, inputs, eos_token_id=eos) == expected
    assert metrics.num_draft_tokens == metrics.num_drafts > 90 and not metrics.num_accepted_tokens


@pytest.mark.parametrize("new", range(1, 8))
def test_c02_lengths(new):
    target = fresh("llama")
    inputs = batch(random_rows((9, 4), seed=7))
    for topk in (1, 3):
        with accelerated(
            target, model=fresh("llama"), num_speculative_tokens=6, draft_tree_topk=topk
        ):
            out = new_tokens(target, inputs, max_new_tokens=new)
            assert [len(row) for row in out] == [new] * 2
            out = target.generate(**inputs, max_length=9 + new, do_sample=False)
            assert out.shape[1] == 9 + new


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("topk", [1, 2])
def test_b18_the_end_of_positions(name, topk):
    """Of the draft model, while the target goes on; and of the target."""
    short = dict(max_position_embeddings=24, **({"n_positions": 24} if name == "gpt2" else {}))
    target, draft = fresh(name), fresh(name, **short)
    for lens in ((9, 4), (23, 4), (24, 9), (30, 9), (40, 30)):
        inputs = batch(random_rows(lens, seed=8))
        expected = new_tokens(target, inputs, max_new_tokens=30)
        options = dict(num_speculative_tokens=6, draft_tree_topk=topk)
        with accelerated(target, model=draft, **options) as metrics:
            assert new_tokens(target, inputs, max_new_tokens=30) == expected
        assert (metrics.num_draft_tokens > 0) == (min(lens) < 24)
    target = fresh(name, **short)
    inputs = batch(random_rows((9,), seed=8))
    for new in (15, 16):
        expected = new_tokens(target, inputs, max_new_tokens=new)
        with accelerated(target, model=fresh(name), num_speculative_tokens=8):
            assert new_tokens(target, inputs, max_new_tokens=new) == expected


@pytest.mark.parametrize("size", [80, 64, 128])
@pytest.mark.parametrize("topk", [1, 3])
def test_c18_vocabularies_of_other_padding(size, topk):
    """B21: no token goes to a table that lacks it."""
    target, draft = fresh("llama"), fresh("llama", vocab_size=size)
    inputs = batch(random_rows((9, 4), seed=9))
    seen = []
    draft.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: seen.append((int(args[0].min()), int(args[0].max())))
    )
    expected = new_tokens(target, inputs)
    with accelerated(target, model=draft, num_speculative_tokens=4, draft_tree_topk=topk):
        assert new_tokens(target, inputs) == expected
    assert seen and min(low for low, _ in seen) >= 0 and max(high for _, high in seen) < size


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("size", [6, 11])
def test_c18_exact_joint_of_a_padded_vocabulary(size, rule):
    model = fresh("llama", **SMALL)
    draft = fresh("llama", **{**SMALL, "vocab_size": size})
    options = dict(draft_sample_method="probabilistic", rule=rule, num_speculative_tokens=3)
    torch.manual_seed(5)
    with accelerated(model, model=draft, **options) as metrics:
        counts = draw(model, 6_300, **PLAIN)
    assert metrics.num_accepted_tokens > 100
    assert min(pvalues(counts, joints("plain"))) > FALSE_ALARM
