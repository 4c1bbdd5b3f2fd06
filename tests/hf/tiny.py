"""Tiny random models of many families, prompts where lookups match and fail, scripted drafters."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import specdec_kernels as sdk
from specdec_kernels.hf import layers
from specdec_kernels.ops.linear_small_m import linear_small_m
from specdec_kernels.tree import ROOT_PARENT, DraftTree

VOCAB = 96
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    tie_word_embeddings=False,
    eos_token_id=None,
)
WINDOW = dict(sliding_window=12, layer_types=["sliding_attention", "full_attention"])
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

# model type -> settings that differ from BASE. Windows are shorter than every prompt.
FAMILIES = {
    "llama": dict(head_dim=16),
    "qwen2": dict(use_sliding_window=True, max_window_layers=1, **WINDOW),
    "qwen3": dict(head_dim=8),
    "mistral": dict(sliding_window=12, head_dim=8),
    "gemma2": dict(
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        attn_implementation="eager",
        **WINDOW,
    ),
    "gemma3_text": dict(head_dim=16, query_pre_attn_scalar=16, **WINDOW),
    "phi3": dict(sliding_window=12),
    "gpt2": dict(n_positions=512, n_embd=32, n_layer=2, n_head=4),
    "gpt_oss": dict(head_dim=8, **WINDOW, **MOE),
    "qwen3_moe": dict(head_dim=8, decoder_sparse_step=1, **MOE),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": dict(),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "cohere2": dict(logit_scale=1.0, **WINDOW),
    "olmo2": dict(),
    "granite": dict(
        attention_multiplier=0.3,
        logits_scaling=0.5,
        residual_multiplier=0.7,
        embedding_multiplier=2.0,
    ),
    "glm4": dict(head_dim=8, partial_rotary_factor=0.5),
    "smollm3": dict(
        no_rope_layers=[1, 0], no_rope_layer_interval=2, use_sliding_window=True, **WINDOW
    ),
}


# Weights, scaled, whose greedy text varies: (scale, seed).
WEIGHTS = {
    "llama": (6, 3),
    "qwen2": (6, 0),
    "qwen3": (6, 1),
    "mistral": (5, 1),
    "gemma2": (6, 2),
    "gemma3_text": (5, 2),
    "phi3": (6, 3),
    "gpt2": (4, 3),
    "gpt_oss": (6, 0),
    "qwen3_moe": (4, 1),
    "opt": (5, 0),
    "gpt_neox": (4, 1),
    "deepseek_v3": (6, 2),
    "cohere2": (6, 2),
    "olmo2": (4, 2),
    "granite": (4, 0),
    "glm4": (6, 2),
    "smollm3": (5, 2),
}


def has_family(name):
    return name in CONFIG_MAPPING


@functools.cache
def _model(name, seed, scale, settings):
    settings = {**BASE, **FAMILIES.get(name, {}), **dict(settings)}
    implementation = settings.pop("attn_implementation", None)
    config = CONFIG_MAPPING[name](**copy.deepcopy(settings))
    for size in ("vocab_size", "hidden_size"):
        assert getattr(config, size) == settings[size]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() >= 2:  # flat logits would make near ties
            parameter.data.mul_(scale)
        elif "sinks" in parameter_name:
            parameter.data.normal_(std=2.0)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def tiny(name="llama", **settings):
    """A model that tests share: leave it unpatched."""
    scale, seed = WEIGHTS.get(name, (5, 0))
    return _model(name, seed, float(scale), tuple(sorted(settings.items(), key=str)))


def fresh(name="llama", **settings):
    """A model of the test's own."""
    return copy.deepcopy(tiny(name, **settings))


def batch(rows):
    """Left-padded ids and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def random_rows(lens, seed=0, low=2, high=VOCAB):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=g).tolist() for n in lens]


def new_tokens(model, inputs, **options):
    """Greedy tokens behind the prompts, one list per row."""
    options = {"do_sample": False, "max_new_tokens": 48, **options}
    out = model.generate(**inputs, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def lookup_rows(model, lens=(3, 9, 14), seed=0, length=24):
    """Prompts with the model's own continuation and a copy of it with every fifth token wrong."""
    rows = random_rows(lens, seed)
    texts = new_tokens(model, batch(rows), max_new_tokens=length)
    spoilt = [[t if i % 5 else 2 + t % 7 for i, t in enumerate(text)] for text in texts]
    return [r + t + s + r[-3:] + t[:4] for r, t, s in zip(rows, texts, spoilt, strict=True)]


@contextlib.contextmanager
def accelerated(model, /, allowed=None, **options):
    """Patched inside; a warning of ours (the call would run plain) fails the test.

    allowed: the beginning of one that does not.
    """
    with warnings.catch_warnings(), sdk.patched(model, **options):
        warnings.filterwarnings("error", message="specdec_kernels")
        if allowed is not None:
            warnings.filterwarnings("ignore", message=f"specdec_kernels: {allowed}")
        yield sdk.metrics(model)


def wrong(token):
    """Another token, never padding or one of the special ids below it."""
    return 2 + (token + 1) % (VOCAB - 2)


class Scripted:
    """A drafter that proposes what `plan(row, text)` says: chains, merged into one tree.

    text: the row's tokens so far. The chains' order decides the slots.
    """

    hidden_layers = ()

    def __init__(self, plan):
        self.plan = plan
        self.sizes = []  # per step, the drafted depth of each row

    def __call__(self, config, eos_token_ids, *sources):  # stands in for make_drafter
        return self

    def begin(self, tokens, lens, features):
        self.sizes.clear()

    def confidence(self, tokens, lens):
        return [1] * len(lens)

    def propose(self, tokens, lens, sampling, max_nodes, max_depth):
        rows, links = [], []
        for b, (length, nodes, depth) in enumerate(
            zip(lens.tolist(), max_nodes, max_depth, strict=True)
        ):
            text = tokens[b, :length].tolist()
            row, parents = ([text[-1]], [ROOT_PARENT]) if nodes else ([], [])
            slots = {}
            for chain in self.plan(b, text) if nodes else []:
                node = 0
                for token in chain[:depth]:
                    if (node, token) not in slots:
                        if len(row) >= nodes:
                            break
                        slots[node, token] = len(row)
                        row.append(token)
                        parents.append(node)
                    node = slots[node, token]
            rows.append(row)
            links.append(parents)
        tree = DraftTree.from_lists(rows, links)
        self.sizes.append(tree.drafted_depth())
        return tree

    def commit(self, acceptance, features):
        pass

    def end(self, tokens, lens):
        pass


def future_of(prompts, texts):
    """plan helper: the tokens that plain decoding emits behind `text` in row b."""

    def future(b, text):
        return texts[b][len(text) - len(prompts[b]) :]

    return future


def use_drafter(monkeypatch, plan):
    """Every run from here on drafts by `plan`; returns the drafter."""
    drafter = Scripted(plan)
    monkeypatch.setattr("specdec_kernels.hf.generate.make_drafter", drafter)
    return drafter


def use_as_kernel(monkeypatch, function):
    """Verify forwards call `function` in place of linear_small_m."""
    quickest = layers.quickest
    monkeypatch.setattr(
        layers, "quickest", lambda op: function if op is linear_small_m else quickest(op)
    )


@functools.cache
def char_tokenizer():
    """One printable character per token (id = code - 31), padding 0; text is the concatenation."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, **{chr(31 + i): i for i in range(1, VOCAB)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left"
    )


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.puts = []
        self.ends = 0

    def put(self, value):
        assert self.ends == 0
        assert value.dim() == 1 or value.shape[0] == 1
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1
