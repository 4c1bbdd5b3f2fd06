"""EAGLE heads through generate: the text is the target's, whatever the head says."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from eagle_heads import eagle1, head_weights, safeailab
from test_families import ALL
from test_sampling import FALSE_ALARM, PLAIN, SMALL, WARPED, draw, joints, pvalues
from tiny import accelerated, batch, fresh, new_tokens, random_rows, tiny

IDS = (0, 2, 1)


def agreeing(target, folder, share=0.02):
    """A target whose next token hangs on its last one, and an EAGLE-1 head that says the same."""
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(share)
        layer.mlp.down_proj.weight.data.mul_(share)
    size = target.config.hidden_size
    weights = head_weights(target, fused=False, size=size, scale=0.02, own_embedding=False)
    del weights["lm_head.weight"]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    return eagle1(folder, target, weights)


TREE = dict(draft_tree_topk=3)


@pytest.mark.parametrize("options", [{}, TREE, dict(draft_tree_topk=2, draft_tree_depth=2)])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_c17_greedy_text_is_that_of_the_target(name, options, tmp_path):
    """B15: batches of 1, 2 and 3, ragged; one drafted token, five, and the controller's choice."""
    target = fresh(name)
    head = safeailab(tmp_path, target, head_weights(target, ids=IDS, drafted=30), IDS)
    rows = random_rows((3, 9, 21), seed=1)
    for inputs in (batch(rows[1:2]), batch(rows[:2]), batch(rows)):
        expected = new_tokens(target, inputs)
        for size in (1, 5, None):
            with accelerated(target, model=head, num_speculative_tokens=size, **options) as metrics:
                assert new_tokens(target, inputs) == expected
            assert size is None or metrics.num_draft_tokens > 0


@pytest.mark.parametrize("name", ALL)
def test_every_family_gives_its_hidden_states(name, tmp_path):
    target = fresh(name)
    head = safeailab(tmp_path, target, head_weights(target, ids=IDS), IDS)
    inputs = batch(random_rows((3, 9), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=12)
    with accelerated(target, model=head, method="eagle3", num_speculative_tokens=3) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=12) == expected
    assert metrics.num_draft_tokens > 0


@pytest.mark.parametrize("options", [{}, TREE])
@pytest.mark.parametrize("size", [4, None])
def test_drafts_that_hold(options, size, tmp_path):
    target = fresh("llama")
    head = agreeing(target, tmp_path)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    expected = new_tokens(target, inputs)
    with accelerated(target, model=head, num_speculative_tokens=size, **options) as metrics:
        assert new_tokens(target, inputs) == expected
    assert size is None or metrics.mean_acceptance_length > 2


def test_an_end_inside_a_draft(tmp_path):
    """B10: nothing is drafted behind an end, and the text ends there."""
    target = fresh("llama")
    head = agreeing(target, tmp_path)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    end = new_tokens(target, inputs)[0][10]
    options = dict(eos_token_id=end, pad_token_id=0)
    expected = new_tokens(target, inputs, **options)
    for more in ({}, TREE):
        with accelerated(target, model=head, num_speculative_tokens=6, **more):
            assert new_tokens(target, inputs, **options) == expected


@pytest.mark.parametrize("options", [{}, TREE])
def test_a_head_with_fewer_positions_stops_drafting(options, tmp_path):
    """The text goes on plain behind the head's end, row by row."""
    target = fresh("llama")
    weights = head_weights(target, ids=IDS)
    head = safeailab(tmp_path, target, weights, IDS, max_position_embeddings=40)
    inputs = batch(random_rows((3, 9, 45), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=60)
    with accelerated(target, model=head, num_speculative_tokens=3, **options) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=60) == expected
    assert 20 < metrics.num_draft_tokens < 3 * 2 * 40
    assert metrics.num_steps >= 22


def test_a_long_prompt_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_kernels.drafting.recurrent.CHUNK", 16)
    target = fresh("llama")
    head = agreeing(target, tmp_path)
    inputs = batch(random_rows((3, 100, 77), seed=1))
    expected = new_tokens(target, inputs)
    with accelerated(target, model=head, num_speculative_tokens=4) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.mean_acceptance_length > 2.5


def test_the_invariant_forward(tmp_path):
    target = fresh("llama")
    head = agreeing(target, tmp_path)
    inputs = batch(random_rows((3, 9), seed=1))
    with accelerated(target, method="none", linear="invariant"):
        expected = new_tokens(target, inputs)
    with accelerated(target, model=head, linear="invariant", num_speculative_tokens=4) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.num_accepted_tokens > 0


@pytest.fixture
def small(tmp_path):
    """The target of test_sampling, and a head over five of its eight tokens."""
    target = fresh("llama", **SMALL)
    weights = head_weights(tiny("llama", **SMALL), ids=(0, 1), drafted=5, scale=0.2)
    return target, safeailab(tmp_path, target, weights, (0, 1))


DRAWN = dict(draft_sample_method="probabilistic")


@pytest.mark.parametrize(
    "name, options",
    [
        ("plain", DRAWN),
        ("plain", dict(rule="block", **DRAWN)),
        ("warped", dict(rule="coupled", **DRAWN)),
        ("warped", {}),
        ("warped", DRAWN),
        ("plain", dict(rule="recursive", **TREE)),
        ("warped", TREE),
    ],
    ids=str,
)
def test_c13_a03_exact_joint(small, name, options):
    """The target's law for drafts over a reduced vocabulary, chains and trees, drawn or best."""
    target, head = small
    torch.manual_seed(1)
    with accelerated(target, model=head, num_speculative_tokens=3, **options) as metrics:
        counts = draw(target, 8_400, **(WARPED if name == "warped" else PLAIN))
    assert metrics.num_accepted_tokens > 250
    assert min(pvalues(counts, joints(name))) > FALSE_ALARM


def test_c13_negative_control_of_the_map(small, monkeypatch):
    """Drafts that were drawn, said to be drawn from other tokens' logits."""
    from specdec_kernels.drafting.eagle import EagleDrafter

    original = EagleDrafter._chain

    def wrong(self, *args):
        tree = original(self, *args)
        return tree._replace(draft_logits=tree.draft_logits.roll(1, -1))

    monkeypatch.setattr(EagleDrafter, "_chain", wrong)
    target, head = small
    torch.manual_seed(1)
    with accelerated(target, model=head, num_speculative_tokens=3, **DRAWN):
        counts = draw(target, 10_500, **PLAIN)
    assert min(pvalues(counts, joints("plain"))) < FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_heads_take_the_targets_dtype(dtype, tmp_path):
    target = fresh("llama").to(dtype)
    head = safeailab(tmp_path, target, head_weights(target, ids=IDS, drafted=30), IDS)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    for options in ({}, TREE):
        with accelerated(target, model=head, num_speculative_tokens=4, **options) as metrics:
            new_tokens(target, inputs)
        assert metrics.num_draft_tokens > 0


def test_threads_share_a_head(tmp_path):
    """Each run keeps its own hidden states, though the hooks stand on one model."""
    target = fresh("llama")
    head = agreeing(target, tmp_path)
    inputs = [batch(random_rows((3, 9 + n), seed=n)) for n in range(4)]
    expected = [new_tokens(target, x) for x in inputs]
    options = dict(model=head, num_speculative_tokens=4)
    with accelerated(target, **options) as metrics, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: new_tokens(target, x), inputs)) == expected
    assert metrics.mean_acceptance_length > 2
