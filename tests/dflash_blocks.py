"""Tiny random DFlash drafters, written as their producers write them, and what they draft.

`Dense` computes a block without cache or batch: every question runs the whole text again.
"""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import save_file
from torch.nn import functional

INTER, HEADS, KV_HEADS, DIM = 40, 4, 2, 8
THETA, EPS, BLOCK, MASK = 500.0, 1e-5, 6, 90


def block_weights(
    target, *, ids=(2, 3, 1), layers=2, size=None, seed=0, scale=0.35, drafted=None,
    own_embedding=False, own_lm_head=False, biases=False, qk_norms=True, rank=None, confidence=None,
):  # fmt: skip
    """Weights by name; a d2t that skips around, and an lm_head, when `drafted` is given.

    rank, confidence: of DSpark, the table of pairs and what its confidence head reads ("state" or
    "both").
    """
    text = target.config.get_text_config()
    size = size or text.hidden_size
    g = torch.Generator().manual_seed(seed)
    weights = {}

    def add(name, *shape):
        noise = torch.randn(shape, generator=g)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else scale * noise

    def linear(name, out, wide):
        add(f"{name}.weight", out, wide)
        if biases:
            weights[f"{name}.bias"] = torch.randn(out, generator=g)

    add("fc.weight", size, len(ids) * text.hidden_size)
    add("hidden_norm.weight", size)
    for i in range(layers):
        layer = f"layers.{i}."
        for name, out in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            linear(layer + "self_attn." + name, out * DIM, size)
        linear(layer + "self_attn.o_proj", size, HEADS * DIM)
        for name in ("q_norm", "k_norm") if qk_norms else ():
            add(f"{layer}self_attn.{name}.weight", DIM)
        linear(layer + "mlp.gate_proj", INTER, size)
        linear(layer + "mlp.up_proj", INTER, size)
        linear(layer + "mlp.down_proj", size, INTER)
        add(layer + "input_layernorm.weight", size)
        add(layer + "post_attention_layernorm.weight", size)
    add("norm.weight", size)
    if rank:
        add("markov_head.markov_w1.weight", text.vocab_size, rank)
        add("markov_head.markov_w2.weight", drafted or text.vocab_size, rank)
        weights["markov_head.markov_w2.weight"] *= 8
    if confidence:
        add("confidence_head.proj.weight", 1, size + (rank if confidence == "both" else 0))
        weights["confidence_head.proj.bias"] = torch.tensor([0.3])
    if own_embedding:
        add("embed_tokens.weight", text.vocab_size, size)
        weights["embed_tokens.weight"] *= 3
    if own_lm_head or drafted:
        add("lm_head.weight", drafted or text.vocab_size, size)
        weights["lm_head.weight"] *= 3
    if drafted:
        chosen = torch.randperm(text.vocab_size, generator=g)[:drafted].sort().values
        chosen[-1] = text.vocab_size - 1
        weights["d2t"] = chosen - torch.arange(drafted)
        weights["t2d"] = torch.isin(torch.arange(text.vocab_size), chosen)
    return weights


def layer_config(target, weights, **changes):
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": len(weights["norm.weight"]),
        "intermediate_size": INTER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 5,  # wrong on purpose
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "vocab_size": target.config.get_text_config().vocab_size,
        **changes,
    }


def write(folder, config, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    return str(folder)


def zlab(folder, target, weights, ids=(2, 3, 1), nested=None, **changes):
    """ids: as transformers counts; nested: further settings of dflash_config."""
    config = layer_config(target, weights, block_size=BLOCK)
    config["num_target_layers"] = target.config.get_text_config().num_hidden_layers
    inner = {"mask_token_id": MASK, "target_layer_ids": [k - 1 for k in ids], **(nested or {})}
    config["dflash_config"] = inner
    return write(folder, {**config, **changes}, weights)


def speculators(folder, target, weights, ids=(2, 3, 1), layer=None, **changes):
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(target, weights, **(layer or {})),
        "draft_vocab_size": len(weights.get("d2t", range(target.config.vocab_size))),
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(ids),
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **changes,
    }
    return write(folder, config, weights)


def deepspec(folder, target, weights, ids=(2, 3, 1), **changes):
    """DSpark by its makers: with copies of the target's tables."""
    config = layer_config(target, weights, architectures=["Qwen3DSparkModel"], block_size=BLOCK)
    config |= dict(target_layer_ids=[k - 1 for k in ids], mask_token_id=MASK, num_anchors=512)
    config |= {"markov_head_type": "vanilla", "enable_confidence_head": True, **changes}
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    names = "embed_tokens.weight", "lm_head.weight"
    copies = {name: w.detach().clone() for name, w in zip(names, tables, strict=True)}
    return write(folder, config, {**copies, **weights})


class Dense:
    """ids: hidden states as transformers counts. windows, causal: per layer."""

    def __init__(
        self, target, weights, ids=(2, 3, 1), windows=(None, None), causal=(False, False),
        block=BLOCK, softcap=None, from_anchor=False,
    ):  # fmt: skip
        self.target, self.w, self.ids = target, weights, ids
        self.windows, self.causal, self.block, self.softcap = windows, causal, block, softcap
        self.first = 0 if from_anchor else 1
        d2t = weights.get("d2t")
        self.map = None if d2t is None else torch.arange(len(d2t)) + d2t

    def norm(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.w[name + ".weight"]

    def linear(self, x, name):
        return functional.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def embedded(self, tokens):
        ids = torch.tensor(tokens)
        if "embed_tokens.weight" in self.w:
            return self.w["embed_tokens.weight"][ids]
        return self.target.get_input_embeddings()(ids)

    def rotated(self, x, start):
        """x [heads, S, DIM] by pairs (i, i + DIM / 2), from position `start` on."""
        places = start + torch.arange(x.shape[1])[:, None]
        angles = places * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    def heads(self, x, layer, name):
        y = self.linear(x, f"{layer}self_attn.{name}_proj").view(len(x), -1, DIM)
        if f"{layer}self_attn.{name}_norm.weight" in self.w:
            y = self.norm(y, f"{layer}self_attn.{name}_norm")
        return y.transpose(0, 1)

    def attention(self, x, context, i):
        """x [T, d] behind context [S, d]."""
        layer, start = f"layers.{i}.", len(context)
        q = self.rotated(self.heads(x, layer, "q"), start)
        both = torch.cat([context, x])
        k, v = self.rotated(self.heads(both, layer, "k"), 0), self.heads(both, layer, "v")
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
        distance = start + torch.arange(len(x))[:, None] - torch.arange(len(both))
        seen = distance < (self.windows[i] or math.inf)
        seen &= distance >= (0 if self.causal[i] else -len(x))
        scores = (q @ k.transpose(1, 2) / math.sqrt(DIM)).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.linear(out, layer + "self_attn.o_proj")

    @torch.no_grad()
    def __call__(self, text):
        """Logits [levels, Vd] of the tokens behind a text, and what they are made of."""
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[k][0] for k in self.ids], -1)
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        x = self.embedded([text[-1], *[MASK] * (self.block - 1)])
        for i in range(len(self.causal)):
            layer = f"layers.{i}."
            x = x + self.attention(self.norm(x, layer + "input_layernorm"), context, i)
            y = self.norm(x, layer + "post_attention_layernorm")
            gate = functional.silu(self.linear(y, layer + "mlp.gate_proj"))
            x = x + self.linear(
                gate * self.linear(y, layer + "mlp.up_proj"), layer + "mlp.down_proj"
            )
        out = self.norm(x, "norm")[self.first :]
        own = "lm_head.weight" in self.w
        logits = self.linear(out, "lm_head") if own else self.target.get_output_embeddings()(out)
        cap = self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap), out

    def behind(self, token, row):
        """A position's logits behind a token."""
        if "markov_head.markov_w1.weight" not in self.w:
            return row
        pairs = (
            self.w["markov_head.markov_w2.weight"] @ self.w["markov_head.markov_w1.weight"][token]
        )
        return row + pairs

    def confidence(self, token, state):
        weight = self.w["confidence_head.proj.weight"][0]
        if len(weight) > len(state):
            state = torch.cat([state, self.w["markov_head.markov_w1.weight"][token]])
        return float(torch.sigmoid(weight @ state + self.w["confidence_head.proj.bias"]))

    def to_target(self, token):
        return token if self.map is None else int(self.map[token])

    def chain(self, text, size, sure=0.0):
        """sure: the least confidence of a drafted token."""
        path = []
        for row, state in list(zip(*self(text), strict=True))[:size]:
            before = path[-1] if path else text[-1]
            if sure and self.confidence(before, state) < sure:
                break
            path.append(self.to_target(int(self.behind(before, row).argmax())))
        return path

    def tree(self, text, topk, size, depth):
        """The best `size` nodes as {path: score}, of all paths of `topk` tokens a level."""
        level, found = [((), 0.0)], []
        for row in self(text)[0][:depth]:
            below = []
            for path, score in level:
                logits = self.behind(path[-1] if path else text[-1], row)
                for p, i in zip(*logits.log_softmax(-1).topk(topk), strict=True):
                    below.append(((*path, self.to_target(int(i))), score + float(p)))
            level = sorted(below, key=lambda node: -node[1])[: size + topk]
            found += level
        return dict(sorted(found, key=lambda node: -node[1])[:size])
