"""Tiny random EAGLE heads, written as their producers write them, and what they say by definition.

`Dense` computes a head without cache, batch or tree: every question runs the whole text again.
"""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import save_file
from torch.nn import functional

D, INTER, HEADS, KV_HEADS, DIM = 24, 40, 4, 2, 8
THETA, EPS = 500.0, 1e-5


def head_weights(
    target, *, fused=True, drafted=None, ids=(2, 3, 1), layers=1, size=D, seed=0, scale=0.35,
    own_embedding=True, own_lm_head=True, biases=False, qk_norms=False, norm_before_fc=False,
    fc_norm=False,
):  # fmt: skip
    """Weights by canonical name; a d2t that skips around when `drafted` is given."""
    text = target.config.get_text_config()
    g = torch.Generator().manual_seed(seed)
    weights = {}

    def add(name, *shape):
        noise = torch.randn(shape, generator=g)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else scale * noise

    def linear(name, out, wide):
        add(f"{name}.weight", out, wide)
        if biases:
            weights[f"{name}.bias"] = torch.randn(out, generator=g)

    linear("fc", size, len(ids) * text.hidden_size if fused else 2 * size)
    if norm_before_fc:
        add("input_norm.weight", len(ids) * text.hidden_size)
    for i in range(len(ids) if fc_norm else 0):
        add(f"fc_norm.{i}.weight", text.hidden_size)
    for i in range(layers):
        wide = 2 * size if fused and i == 0 else size
        layer = f"layers.{i}."
        for name, out, columns in (
            ("q_proj", HEADS * DIM, wide),
            ("k_proj", KV_HEADS * DIM, wide),
            ("v_proj", KV_HEADS * DIM, wide),
            ("o_proj", size, HEADS * DIM),
        ):
            linear(layer + "self_attn." + name, out, columns)
        for name in ("q_norm", "k_norm") if qk_norms else ():
            add(f"{layer}self_attn.{name}.weight", DIM)
        linear(layer + "mlp.gate_proj", INTER, size)
        linear(layer + "mlp.up_proj", INTER, size)
        linear(layer + "mlp.down_proj", size, INTER)
        add(layer + "post_attention_layernorm.weight", size)
        if fused or i > 0:
            add(layer + "input_layernorm.weight", size)
        if fused and i == 0:
            add(layer + "hidden_norm.weight", size)
    if fused:
        add("norm.weight", size)
    if own_embedding:
        add("embed_tokens.weight", text.vocab_size, size)
        weights["embed_tokens.weight"] *= 3
    if own_lm_head:
        add("lm_head.weight", drafted or text.vocab_size, size)
        weights["lm_head.weight"] *= 6
    if drafted:
        chosen = torch.randperm(text.vocab_size, generator=g)[:drafted].sort().values
        chosen[-1] = text.vocab_size - 1
        weights["d2t"] = chosen - torch.arange(drafted)
        weights["t2d"] = torch.isin(torch.arange(text.vocab_size), chosen)
    return weights


def layer_config(target, size=D, **changes):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": INTER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "vocab_size": target.config.get_text_config().vocab_size,
        **changes,
    }


def write(folder, config, weights, binary=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: w.contiguous() for name, w in weights.items()}
    if binary:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return str(folder)


def safeailab(folder, target, weights, ids=None, binary=False, **flags):
    """ids: as outputs of layers, in eagle_config."""
    config = layer_config(target, num_hidden_layers=40, **flags)  # wrong on purpose
    if "lm_head.weight" in weights:
        config["draft_vocab_size"] = len(weights["lm_head.weight"])
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids]}
    renamed = {n.replace("layers.0.", "midlayer."): w for n, w in weights.items()}
    return write(folder, config, renamed, binary)


def _drafted(target, weights):
    table = weights.get("lm_head.weight", weights.get("d2t"))
    return target.config.get_text_config().vocab_size if table is None else len(table)


def speculators(folder, target, weights, ids, window=None, size=D, **flags):
    layer = layer_config(target, size)
    if window is not None:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        "transformer_layer_config": layer,
        "draft_vocab_size": _drafted(target, weights),
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "target_hidden_size": None,
        **flags,
    }
    extra = {"verifier_norm.weight": torch.ones(3), "verifier_lm_head.weight": torch.ones(3, 3)}
    return write(folder, config, {**weights, **extra})


def deepspec(folder, target, weights, ids):
    config = layer_config(target, architectures=["Qwen3Eagle3Model"])
    config["target_layer_ids"] = [k - 1 for k in ids]
    return write(folder, config, weights)


def eagle1(folder, target, weights, binary=False, **changes):
    size = target.config.get_text_config().hidden_size
    return write(folder, layer_config(target, size, **changes), weights, binary)


class Dense:
    """weights: canonical, with lm_head and embed_tokens. ids: hidden states as transformers counts.

    flags: norm_before_residual, norm_output. least_text: shorter texts are not drafted for.
    """

    least_text = 2

    def __init__(self, target, weights, ids, fused=True, window=None, **flags):
        self.target, self.w, self.ids, self.fused = target, weights, ids, fused
        self.window, self.flags = window, flags
        d2t = weights.get("d2t")
        self.map = None if d2t is None else torch.arange(len(d2t)) + d2t

    def norm(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.w[name + ".weight"]

    def linear(self, x, name):
        return functional.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    @torch.no_grad()
    def features(self, text):
        """The hidden states of the target's forward over all tokens but the last: [n - 1, d]."""
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        if not self.fused:
            return states[-1][0]
        x = torch.cat([states[k][0] for k in self.ids], -1)
        if "input_norm.weight" in self.w:
            x = self.norm(x, "input_norm")
        if "fc_norm.0.weight" in self.w:
            parts = x.chunk(len(self.ids), -1)
            x = torch.cat([self.norm(y, f"fc_norm.{i}") for i, y in enumerate(parts)], -1)
        return self.linear(x, "fc")

    def rotated(self, x):
        """x [heads, S, DIM] by pairs (i, i + DIM / 2)."""
        angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    def attention(self, x, layer):
        def heads(name, norm):
            y = self.linear(x, f"{layer}self_attn.{name}_proj").view(len(x), -1, DIM)
            if f"{layer}self_attn.{norm}.weight" in self.w:
                y = self.norm(y, f"{layer}self_attn.{norm}")
            return y.transpose(0, 1)

        q, k = self.rotated(heads("q", "q_norm")), self.rotated(heads("k", "k_norm"))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, heads("v", "")))
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (distance >= 0) & (distance < (self.window or math.inf))
        scores = (q @ k.transpose(1, 2) / math.sqrt(DIM)).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.linear(out, layer + "self_attn.o_proj")

    @torch.no_grad()
    def __call__(self, tokens, hidden):
        """tokens: S ids, hidden [S, d], one slot each; logits [Vd] and after of the last."""
        embedded = self.w["embed_tokens.weight"][torch.tensor(tokens)]
        if not self.fused:
            hidden = self.linear(torch.cat([embedded, hidden], -1), "fc")
        layers = 1 + max(int(n.split(".")[1]) for n in self.w if n.startswith("layers."))
        for i in range(layers):
            layer, x = f"layers.{i}.", hidden
            if i == 0 and self.fused:
                normed = self.norm(hidden, layer + "hidden_norm")
                x = torch.cat([self.norm(embedded, layer + "input_layernorm"), normed], -1)
                hidden = normed if self.flags.get("norm_before_residual") else hidden
            elif i > 0:
                x = self.norm(hidden, layer + "input_layernorm")
            hidden = hidden + self.attention(x, layer)
            x = self.norm(hidden, layer + "post_attention_layernorm")
            gate = functional.silu(self.linear(x, layer + "mlp.gate_proj"))
            hidden = hidden + self.linear(
                gate * self.linear(x, layer + "mlp.up_proj"), layer + "mlp.down_proj"
            )
        out = self.norm(hidden, "norm") if self.fused else hidden
        after = out if self.flags.get("norm_output") else hidden
        return self.linear(out[-1], "lm_head"), after[-1]

    def to_target(self, token):
        return token if self.map is None else int(self.map[token])

    def behind(self, text, true, path, given):
        """Logits behind a drafted path, and the hidden state for the next slot.

        given: the hidden states of the path's slots.
        """
        return self([*text[1:], *path], torch.cat([true, *(h[None] for h in given)]))

    def chain(self, text, size):
        true, path, given = self.features(text), [], []
        while len(path) < size:
            logits, after = self.behind(text, true, path, given)
            path.append(self.to_target(int(logits.argmax())))
            given.append(after)
        return path

    def tree(self, text, topk, size, depth):
        """The best `size` nodes as (path, score), by EAGLE-2's expansion."""
        true = self.features(text)
        logits, after = self.behind(text, true, [], [])

        def children(path, score, logits, given):
            best = logits.log_softmax(-1).topk(topk)
            return [
                ((*path, self.to_target(int(i))), score + float(p), given)
                for p, i in zip(*best, strict=True)
            ]

        level = children((), 0.0, logits, [after]) if depth else []
        found = list(level)
        for _ in range(depth - 1):
            beam = sorted(level, key=lambda node: -node[1])[:topk]
            level = []
            for path, score, given in beam:
                logits, after = self.behind(text, true, path, given)
                level += children(path, score, logits, [*given, after])
            found += level
        best = sorted(found, key=lambda node: -node[1])[:size]
        return {path: score for path, score, _ in best}
