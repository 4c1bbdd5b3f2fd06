"""MTP layers of every family, in its own layout and with its own kind of layer."""

import copy

import pytest
import torch
from mtp_layers import DEEPSEEK, MIMO, MIMO_V2, QWEN, FamilyMtp
from tiny import BASE, FAMILIES, accelerated, batch, has_family, new_tokens, random_rows
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, modeling_layers

from specdec_kernels.drafting import mtp
from specdec_kernels.drafting.eagle import EagleDrafter
from specdec_kernels.hf import mtp_network
from specdec_kernels.hf.mtp import load_mtp
from specdec_kernels.hf.support import support

MLA = FAMILIES["deepseek_v3"]
EXPERTS = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
)
HYBRID = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    partial_rotary_factor=0.5,
)
GDN = ["linear_attention", "full_attention", "full_attention"]


def behind(i):
    return f"model.layers.{2 + i}."


# model type -> settings, names of the parts, place of layer i, number of MTP layers. The target has
# two layers.
LAYOUTS = {
    "deepseek_v3": (dict(MLA, num_nextn_predict_layers=2), DEEPSEEK, behind, 2),
    "glm4_moe": (dict(EXPERTS, head_dim=8, use_qk_norm=True), DEEPSEEK, behind, 1),
    "glm4_moe_lite": (dict(MLA), DEEPSEEK, behind, 1),
    "qwen3_next": (
        dict(HYBRID, layer_types=GDN, shared_expert_intermediate_size=16, num_experts=4,
             num_experts_per_tok=2, moe_intermediate_size=16),
        QWEN, lambda i: f"mtp.layers.{i}.", 1,
    ),
    "qwen3_5_text": (dict(HYBRID, layer_types=GDN), QWEN, lambda i: f"mtp.layers.{i}.", 1),
    "qwen3_5_moe_text": (
        dict(HYBRID, layer_types=GDN, shared_expert_intermediate_size=16, num_experts=4,
             num_experts_per_tok=2, moe_intermediate_size=16),
        QWEN, lambda i: f"mtp.layers.{i}.", 1,
    ),
    "qwen2": (dict(), MIMO, lambda i: f"model.mtp_layers.{i}.", 1),  # MiMo, whose code is remote
    "mimo_v2_flash": (
        dict(head_dim=16, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=16, sliding_window=6, partial_rotary_factor=0.5,
             layer_types=["full_attention", *["sliding_attention"] * 3],
             mlp_layer_types=["dense", "sparse", "dense", "dense"]),
        MIMO_V2, lambda i: f"model.mtp.layers.{i}.", 2,
    ),
}  # fmt: skip


def made(name, folder):
    """The definition and the target, whose checkpoint has the MTP layers."""
    settings, parts, place, layers = LAYOUTS[name]
    settings = {**BASE, **copy.deepcopy(settings), "num_hidden_layers": 2 + layers}
    config = CONFIG_MAPPING[name](**settings)
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(config).eval()
    for parameter in whole.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(5)
        elif parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    dense = FamilyMtp(whole, layers, hidden_first=parts is MIMO)
    return dense, dense.write(folder, parts, place)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if has_family(n)])
@torch.no_grad()
def test_c16_every_family_drafts_as_defined(name, tmp_path):
    """By its checkpoint alone, chains and trees, rows of unequal length."""
    dense, target = made(name, tmp_path)
    loaded = load_mtp(None, target, "auto")
    assert loaded.head.num_layers == dense.layers
    texts = random_rows((5, 19, 4), seed=2)
    for topk in (1, 3):
        drafted = first_drafts(loaded, dense, texts, topk)
        for text, found in zip(texts, drafted, strict=True):
            if topk == 1:
                expected = dense.chain(text, 4)
                assert found == [tuple(expected[: n + 1]) for n in range(4)]
            else:
                expected = dense.tree(text, 3, 9, 3)
                assert set(found) == set(expected)


def first_drafts(loaded, dense, texts, topk):
    run = loaded.run(len(texts), 64, torch.device("cpu"), lambda text: None)
    drafter = EagleDrafter(run, topk=topk, depth=3)
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int32)
    features = torch.zeros(len(texts), tokens.shape[1], dense.whole.config.hidden_size)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = torch.tensor(text)
        features[b, : len(text) - 1] = dense.features(text)
    lens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    drafter.begin(tokens, lens, features)
    size, levels = (5, 4) if topk == 1 else (10, 3)
    tree = drafter.propose(tokens, lens, None, [size] * len(texts), [levels] * len(texts))
    return [sorted(paths(tree, b)) for b in range(len(texts))]


def paths(tree, b):
    found = {0: ()}
    for slot in range(1, int(tree.num_nodes[b])):
        found[slot] = (*found[int(tree.parents[b, slot])], int(tree.draft_token_ids[b, slot]))
    return [path for path in found.values() if path]


@pytest.mark.parametrize("name", [n for n in LAYOUTS if has_family(n)])
def test_generate_is_plain_generate(name, tmp_path):
    """From the target's own checkpoint; hybrid targets say why they run plain."""
    _, target = made(name, tmp_path)
    inputs = batch(random_rows((3, 11, 1), seed=4))
    expected = new_tokens(target, inputs)
    if not support(target).ok:
        assert "recurrent" in support(target).reason
        return
    for options in ({}, dict(draft_tree_topk=3)):
        with accelerated(target, method="mtp", num_speculative_tokens=5, **options) as metrics:
            assert new_tokens(target, inputs) == expected
        assert metrics.num_draft_tokens > 0


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="transformers has no MTP")
@torch.no_grad()
def test_c16_transformers_own_mtp_drafts_the_same(tmp_path):
    """It drafts one token for each layer; the second one hangs on how layers are chained."""
    from transformers.cache_utils import MtpCache

    dense, target = made("deepseek_v3", tmp_path)
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}.*" for i in (2, 3)]
    theirs = modeling_layers.MtpModel.from_pretrained(target)
    for text in random_rows((5, 19, 4), seed=2):
        ids, _, _ = theirs(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=dense.features(text)[None],
            attention_mask=None,
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=target.config.get_mtp_config()),
        )
        assert ids[0].tolist() == dense.chain(text, 2)


def halves_swapped(monkeypatch):
    """The hidden state before the token."""
    original = mtp_network.MtpLayer.joined
    monkeypatch.setattr(
        mtp_network.MtpLayer, "joined", lambda self, token, state: original(self, state, token)
    )


def layers_unchained(monkeypatch):
    """Every layer reads the target's hidden states."""
    original = mtp.MtpRun._read_layer

    def read(self, s, embedded, hidden, *args):
        return original(self, s, embedded, self.features, *args)

    def text(self, features, *args):
        self.features = features
        return read_text(self, features, *args)

    read_text = mtp.MtpRun._read_text
    monkeypatch.setattr(mtp.MtpRun, "_read_layer", read)
    monkeypatch.setattr(mtp.MtpRun, "_read_text", text)


def one_slot_too_few(monkeypatch):
    """Layers behind the first do not see the slot before."""
    original = mtp.MtpRun._shortened
    monkeypatch.setattr(
        mtp.MtpRun, "_shortened", staticmethod(lambda slots, s: original(slots, s + 1))
    )


@pytest.mark.parametrize("broken", [halves_swapped, layers_unchained, one_slot_too_few])
@torch.no_grad()
def test_broken_layers_would_be_seen(broken, tmp_path, monkeypatch):
    dense, target = made("deepseek_v3", tmp_path)
    loaded = load_mtp(None, target, "auto")
    broken(monkeypatch)
    texts = random_rows((5, 19, 4), seed=2)
    found = [max(paths, key=len) for paths in first_drafts(loaded, dense, texts, 1)]
    assert found != [tuple(dense.chain(text, 4)) for text in texts]
