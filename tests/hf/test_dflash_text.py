"""DFlash through generate: the text is the target's, whatever the drafter says."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dflash_blocks import MASK, block_weights, speculators, zlab
from test_families import ALL
from test_sampling import FALSE_ALARM, PLAIN, SMALL, WARPED, draw, joints, pvalues
from tiny import VOCAB, accelerated, batch, fresh, new_tokens, random_rows, tiny

from specdec_kernels.decoding.controller import CostModel
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.dflash import BlockRun, DFlashDrafter

IDS = (0, 2, 1)
CHAIN, TREE = dict(draft_tree_topk=1), dict(draft_tree_topk=3)
CYCLE, BLOCK, SHARP = 12, 8, 15.0


def drafter(target, folder, **changes):
    return zlab(folder, target, block_weights(target, ids=IDS), IDS, **changes)


def cyclic(target, used=None):
    """Makes the token t be followed by the next one of its cycle of CYCLE, by t alone.

    used: places of a hidden state that tell t; None is all.
    """
    g = torch.Generator().manual_seed(2)
    codes = torch.randn(VOCAB, target.config.hidden_size, generator=g)
    codes[:, used or codes.shape[1] :] = 0
    codes = codes / codes.norm(dim=1, keepdim=True)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data[:] = 0
        layer.mlp.down_proj.weight.data[:] = 0
    target.model.embed_tokens.weight.data[:] = codes
    target.model.norm.weight.data[:] = 1
    target.lm_head.weight.data[[after(t) for t in range(VOCAB)]] = 5 * codes
    return target


def after(token):
    return token // CYCLE * CYCLE + (token + 1) % CYCLE


def orbit(token, size):
    row = [token]
    while len(row) < size:
        row.append(after(row[-1]))
    return row


def copying(target, folder, ids=(1,), fc=None):
    """One head that looks CYCLE + 1 positions back, where the token stood that comes before."""
    size = target.config.hidden_size
    weights = {"fc.weight": torch.eye(size) if fc is None else fc}
    weights["hidden_norm.weight"] = torch.ones(size)
    attention = "layers.0.self_attn."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weights[f"{attention}{name}.weight"] = torch.zeros(size, size)
    angles = (CYCLE + 1) * 500.0 ** (-torch.arange(0, size, 2) / size)
    weights[attention + "q_proj.bias"] = SHARP * torch.cat([torch.ones(size // 2), 0 * angles])
    weights[attention + "k_proj.bias"] = SHARP * torch.cat([angles.cos(), angles.sin()])
    weights[attention + "v_proj.weight"] = torch.eye(size)
    weights[attention + "o_proj.weight"] = 100 * torch.eye(size)
    for name, shape in (("gate_proj", (4, size)), ("up_proj", (4, size)), ("down_proj", (size, 4))):
        weights[f"layers.0.mlp.{name}.weight"] = torch.zeros(shape)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        weights[name + ".weight"] = torch.ones(size)
    changes = dict(intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=size)
    return zlab(folder, target, weights, ids, block_size=BLOCK, **changes)


def copying_target(folder):
    target = cyclic(fresh("llama"))
    return target, copying(target, folder), [orbit(t, n) for t, n in ((2, 25), (30, 15), (50, 20))]


def spoil(monkeypatch):
    """Every third step drafts wrong tokens; per step whether it did."""
    propose, steps = DFlashDrafter.propose, []

    def spoilt(self, *args):
        tree = propose(self, *args)
        steps.append(len(steps) % 3 == 2)
        ids = tree.draft_token_ids.clone()
        if steps[-1]:
            ids[:, 1:] = (ids[:, 1:] + CYCLE) % VOCAB
        return tree._replace(draft_token_ids=ids)

    monkeypatch.setattr(DFlashDrafter, "propose", spoilt)
    return steps


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_b05_a_drafter_that_knows_the_text_is_always_right(shape, tmp_path, monkeypatch):
    """No position and no hidden state is off by one, also behind rejected drafts: 200 tokens."""
    target, source, rows = copying_target(tmp_path)
    expected = [orbit(row[-1], 201)[1:] for row in rows]
    assert new_tokens(target, batch(rows), max_new_tokens=200) == expected
    steps = spoil(monkeypatch)
    options = dict(model=source, num_speculative_tokens=7, **shape)
    with accelerated(target, method="dflash", **options) as metrics:
        assert new_tokens(target, batch(rows), max_new_tokens=200) == expected
    rounds = 1 + 8 * steps.count(False) + steps.count(True)
    assert steps.count(True) >= 10 and 200 <= rounds < 200 + 8
    assert metrics.accepted_per_position[0] == 3 * steps.count(False)


def positions_off(monkeypatch):
    read = BlockRun._read

    def later(self, counts):
        self.kv.set_lens([n + 1 for n in self.kv.lens] if not max(self.kv.lens) else self.kv.lens)
        read(self, counts)
        if self.kv.lens[0] == counts[0] + 1:
            self.kv.set_lens([n - 1 for n in self.kv.lens])

    monkeypatch.setattr(BlockRun, "_read", later)


def features_off(monkeypatch):
    begin = BlockRun.begin
    monkeypatch.setattr(BlockRun, "begin", lambda self, x, n: begin(self, x.roll(1, 1), n))


@pytest.mark.parametrize("broken", [positions_off, features_off])
def test_b05_off_by_one_would_be_seen(broken, tmp_path, monkeypatch):
    target, source, rows = copying_target(tmp_path)
    broken(monkeypatch)
    with accelerated(target, method="dflash", model=source, **CHAIN) as metrics:
        new_tokens(target, batch(rows), max_new_tokens=10)
    assert metrics.num_accepted_tokens < 10


@pytest.mark.parametrize("options", [CHAIN, TREE, {}])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_c17_greedy_text_is_that_of_the_target(name, options, tmp_path):
    """B15: batches of 1, 2 and 3, ragged; one drafted token, five, and the controller's choice."""
    target = fresh(name)
    source = drafter(target, tmp_path)
    rows = random_rows((3, 9, 21), seed=1)
    for inputs in (batch(rows[1:2]), batch(rows[:2]), batch(rows)):
        expected = new_tokens(target, inputs)
        for size in (1, 5, None):
            options = dict(options, num_speculative_tokens=size, method="dflash")
            with accelerated(target, model=source, **options) as metrics:
                assert new_tokens(target, inputs) == expected
            assert size is None or metrics.num_draft_tokens > 0


@pytest.mark.parametrize("name", ALL)
def test_every_family_gives_its_hidden_states(name, tmp_path):
    target = fresh(name)
    source = drafter(target, tmp_path)
    inputs = batch(random_rows((3, 9), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=12)
    with accelerated(target, model=source, method="dflash", num_speculative_tokens=3) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=12) == expected
    assert metrics.num_draft_tokens > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_the_controller_drafts_as_much_as_pays(shape, tmp_path, monkeypatch):
    """One forward whatever the size: where drafts hold, whole blocks. The times are made up."""
    known, drafting = CostModel.record, DraftCost.record
    monkeypatch.setattr(CostModel, "record", lambda self, b, n, _: known(self, b, n, 1 + 0.03 * n))
    monkeypatch.setattr(DraftCost, "record", lambda self, b, n, _: drafting(self, b, n, 0.5))
    target, source, rows = copying_target(tmp_path)
    with accelerated(target, method="dflash", model=source, **shape) as metrics:
        out = new_tokens(target, batch(rows), max_new_tokens=200)
    assert out == [orbit(row[-1], 201)[1:] for row in rows]
    assert metrics.mean_acceptance_length > 6


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_d01_c02_ends_of_text_inside_blocks(shape, tmp_path):
    target, source, rows = copying_target(tmp_path)
    inputs = batch(rows[:2])
    text = new_tokens(target, inputs, max_new_tokens=16)[0]
    with accelerated(target, method="dflash", model=source, num_speculative_tokens=7, **shape):
        found = [new_tokens(target, inputs, eos_token_id=[text[i]]) for i in range(1, 12, 3)]
        short = [new_tokens(target, inputs, max_new_tokens=n) for n in range(1, 9)]
    assert found == [new_tokens(target, inputs, eos_token_id=[text[i]]) for i in range(1, 12, 3)]
    assert short == [new_tokens(target, inputs, max_new_tokens=n) for n in range(1, 9)]


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_b18_where_positions_end(shape, tmp_path):
    """Those of the drafter, row by row, and those of the target."""
    target = fresh("llama")
    source = drafter(target, tmp_path / "a", max_position_embeddings=40)
    inputs = batch(random_rows((3, 9, 45), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=60)
    options = dict(method="dflash", num_speculative_tokens=3, **shape)
    with accelerated(target, model=source, **options) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=60) == expected
    assert 20 < metrics.num_draft_tokens < 3 * 2 * 40 and metrics.num_steps >= 22
    target = fresh("gpt2", max_position_embeddings=24, n_positions=24)
    source = drafter(target, tmp_path / "b")
    inputs = batch(random_rows((9, 4), seed=7))
    for new in (14, 15):
        expected = new_tokens(target, inputs, max_new_tokens=new)
        with accelerated(target, model=source, **options) as metrics:
            assert new_tokens(target, inputs, max_new_tokens=new) == expected
        assert metrics.num_draft_tokens > 0


def test_a_long_prompt_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_kernels.drafting.dflash.run.CHUNK", 16)
    target, source, _ = copying_target(tmp_path)
    inputs = batch([orbit(2, 100), orbit(40, 14), orbit(60, 77)])
    expected = new_tokens(target, inputs)
    options = dict(method="dflash", num_speculative_tokens=7)
    with accelerated(target, model=source, **options, **CHAIN) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.mean_acceptance_length > 6


def test_p_min_and_min_tokens(tmp_path):
    target = fresh("llama")
    source = zlab(tmp_path, target, block_weights(target, ids=IDS, own_lm_head=True), IDS)
    inputs = batch(random_rows((3, 9), seed=1))
    expected = new_tokens(target, inputs)
    drafted = []
    for more in ({}, dict(draft_p_min=0.5), dict(draft_p_min=0.5, draft_min_tokens=3)):
        options = dict(method="dflash", num_speculative_tokens=5, **CHAIN, **more)
        with accelerated(target, model=source, **options) as metrics:
            assert new_tokens(target, inputs) == expected
        drafted.append(metrics.num_draft_tokens)
    assert drafted[0] > drafted[1] > drafted[2] > 0


def test_the_invariant_forward_and_other_drafters_beside(tmp_path):
    target, source, rows = copying_target(tmp_path)
    inputs = batch(rows)
    with accelerated(target, method="none", linear="invariant"):
        expected = new_tokens(target, inputs)
    options = dict(model=source, num_speculative_tokens=5)
    for more in (dict(linear="invariant"), dict(linear="off")):
        with accelerated(target, method="dflash", **more, **options) as metrics:
            assert new_tokens(target, inputs) == expected
        assert metrics.mean_acceptance_length > 4
    for method in ("suffix+dflash", "ngram,dflash"):
        with accelerated(target, method=method, **options) as metrics:
            assert new_tokens(target, inputs) == expected
        assert metrics.mean_acceptance_length > 3


DRAWN = dict(draft_sample_method="probabilistic")


@pytest.fixture(params=[None, 5], ids=["all tokens", "five of eight"])
def small(request, tmp_path):
    """The target of test_sampling, and a drafter over some of its eight tokens."""
    target = fresh("llama", **SMALL)
    size = dict(drafted=request.param, own_lm_head=True, scale=0.2)
    weights = block_weights(tiny("llama", **SMALL), ids=(0, 1), **size)
    source = speculators(tmp_path, target, weights, (0, 1), mask_token_id=6, block_size=4)
    return target, source


@pytest.mark.parametrize(
    "name, options",
    [
        ("plain", DRAWN),
        ("plain", dict(rule="block", **DRAWN)),
        ("warped", dict(rule="token", **DRAWN)),
        ("warped", dict(rule="coupled", **DRAWN)),
        ("warped", {}),
        ("plain", dict(rule="recursive", **TREE)),
    ],
    ids=str,
)
def test_c13_a03_exact_joint(small, name, options):
    """The target's law for drafts from marginals, chains and trees, drawn or best."""
    target, source = small
    torch.manual_seed(1)
    options = dict(options, method="dflash", num_speculative_tokens=3)
    with accelerated(target, model=source, **options) as metrics:
        counts = draw(target, 6_300, **(WARPED if name == "warped" else PLAIN))
    assert metrics.num_accepted_tokens > 250
    assert min(pvalues(counts, joints(name))) > FALSE_ALARM


def test_negative_control_of_drawn_drafts(small, monkeypatch):
    """Drafts that were drawn, said to be drawn from other tokens' logits."""
    draft = DFlashDrafter._draft

    def wrong(self, *args):
        tree = draft(self, *args)
        return tree._replace(draft_logits=tree.draft_logits.roll(1, -1))

    monkeypatch.setattr(DFlashDrafter, "_draft", wrong)
    target, source = small
    torch.manual_seed(1)
    options = dict(method="dflash", num_speculative_tokens=3, **DRAWN)
    with accelerated(target, model=source, **options):
        counts = draw(target, 8_400, **PLAIN)
    assert min(pvalues(counts, joints("plain"))) < FALSE_ALARM


def test_a29_coupled_text_does_not_depend_on_the_drafter(tmp_path):
    """In the kernel, with edited logits, and on the walk."""
    target = fresh("phi3")
    inputs = batch(random_rows((3, 9, 14), seed=5))
    source = drafter(target, tmp_path)
    for extra in (dict(repetition_penalty=1.1, top_k=40), dict(no_repeat_ngram_size=4)):
        options = dict(do_sample=True, temperature=0.6, max_new_tokens=24, **extra)
        with accelerated(target, seed=7, method="none"):
            expected = new_tokens(target, inputs, **options)
        for more in ({}, CHAIN, dict(rule="coupled", **DRAWN)):
            given = dict(method="dflash", num_speculative_tokens=5, seed=7, **more)
            with accelerated(target, model=source, **given) as metrics:
                assert new_tokens(target, inputs, **options) == expected
            assert metrics.num_draft_tokens > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_drafters_take_the_targets_dtype(dtype, tmp_path):
    target = fresh("llama").to(dtype)
    source = drafter(target, tmp_path)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    for options in (CHAIN, TREE):
        options = dict(options, method="dflash", num_speculative_tokens=4)
        with accelerated(target, model=source, **options) as metrics:
            new_tokens(target, inputs)
        assert metrics.num_draft_tokens > 0


def test_threads_share_a_drafter(tmp_path):
    target, source, _ = copying_target(tmp_path)
    inputs = [batch([orbit(2, 14 + n), orbit(40 + n, 20)]) for n in range(4)]
    expected = [new_tokens(target, x) for x in inputs]
    options = dict(method="dflash", model=source, num_speculative_tokens=4)
    with accelerated(target, **options) as metrics, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: new_tokens(target, x), inputs)) == expected
    assert metrics.mean_acceptance_length > 3


def test_b21_masks_are_the_only_ids_that_the_embedding_sees_beside_the_text(tmp_path):
    target = fresh("llama")
    source = drafter(target, tmp_path)
    seen = []
    hook = lambda module, args: seen.append(args[0])  # noqa: E731
    handle = target.model.embed_tokens.register_forward_pre_hook(hook)
    inputs = batch(random_rows((3, 9), seed=1))
    options = dict(method="dflash", model=source, num_speculative_tokens=3)
    with accelerated(target, **options):
        new_tokens(target, inputs, eos_token_id=[5], pad_token_id=0)
    handle.remove()
    blocks = [ids for ids in seen if bool((ids[:, 1:] == MASK).all()) and ids.shape[1] == 6]
    assert len(blocks) > 5
    assert all(int(ids.min()) >= 0 and int(ids.max()) < VOCAB for ids in seen)
