"""Tiny random MTP layers, written as their producers write them, and what they say by definition.

`DenseMtp` computes Llama's layers without cache, batch or tree: every question runs the whole text.
"""

from __future__ import annotations

import copy
import json

import torch
from eagle_heads import DIM, HEADS, INTER, KV_HEADS, Dense, layer_config, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def layer_weights(target, layers=1, seed=0, scale=0.35):
    """{i.part: weight}, with the names that speculators and MiMo have for parts."""
    d = target.config.get_text_config().hidden_size
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "token_layernorm": (d,),
        "hidden_layernorm": (d,),
        "input_proj": (d, 2 * d),
        "input_layernorm": (d,),
        "self_attn.q_proj": (HEADS * DIM, d),
        "self_attn.k_proj": (KV_HEADS * DIM, d),
        "self_attn.v_proj": (KV_HEADS * DIM, d),
        "self_attn.o_proj": (d, HEADS * DIM),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (INTER, d),
        "mlp.up_proj": (INTER, d),
        "mlp.down_proj": (d, INTER),
        "final_layernorm": (d,),
    }
    weights = {}
    for i in range(layers):
        for part, shape in shapes.items():
            noise = torch.randn(shape, generator=g)
            weights[f"{i}.{part}.weight"] = 1 + 0.2 * noise if len(shape) == 1 else scale * noise
    return weights


def speculators_mtp(folder, target, weights, **changes):
    d = target.config.get_text_config().hidden_size
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "mtp", "default_proposal_method": "greedy"},
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer_config(target, d, **changes),
    }
    return write(folder, config, {f"mtp_layers.{n}": w for n, w in weights.items()})


class DenseMtp(Dense):
    """hidden_first: the hidden state stands before the token in what input_proj reads."""

    def __init__(self, target, weights, hidden_first=False):
        super().__init__(target, weights, (), fused=False)
        self.hidden_first = hidden_first
        self.layers = self.least_text = 1 + max(int(name.split(".")[0]) for name in weights)

    @torch.no_grad()
    def layer(self, i, tokens, hidden):
        """Layer i over S slots of token ids and hidden [S, d]; its normed output [S, d]."""
        token = self.norm(
            self.target.get_input_embeddings()(torch.tensor(tokens)), f"{i}.token_layernorm"
        )
        state = self.norm(hidden, f"{i}.hidden_layernorm")
        x = torch.cat([state, token] if self.hidden_first else [token, state], -1)
        x = self.linear(x, f"{i}.input_proj")
        x = x + self.attention(self.norm(x, f"{i}.input_layernorm"), f"{i}.")
        y = self.norm(x, f"{i}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(y, f"{i}.mlp.gate_proj"))
        x = x + self.linear(gate * self.linear(y, f"{i}.mlp.up_proj"), f"{i}.mlp.down_proj")
        return self.norm(x, f"{i}.final_layernorm")

    @torch.no_grad()
    def behind(self, text, true, path, given):
        """Logits behind a drafted path, and no state: all is computed again from the text.

        Layer s reads the tokens behind the first s + 1. One that predicts more than its own token
        has further slots, each with its output of the slot before.
        """
        hidden, tokens, last = true, [*text, *path], min(len(path), self.layers - 1)
        for s in range(last):
            hidden = self.layer(s, tokens[s + 1 :][: len(hidden)], hidden)
        for _ in range(len(path) - last):
            out = self.layer(last, tokens[last + 1 :][: len(hidden)], hidden)
            hidden = torch.cat([hidden, out[-1:]])
        out = self.layer(last, tokens[last + 1 :], hidden)
        return self.target.get_output_embeddings()(out[-1]), None


# What families call the parts around a layer: token norm, hidden norm, projection, final norm.
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
MIMO_V2 = ("enorm", "hnorm", "eh_proj", "final_layernorm")


class FamilyMtp(DenseMtp):
    """MTP layers of any family: the last layers of a model of transformers, run without a cache.

    parts: for each layer the norms and the projection around it, as modules.
    """

    def __init__(self, whole, layers, hidden_first=False, seed=0):
        self.whole, self.layers, self.hidden_first = whole, layers, hidden_first
        self.first = whole.config.num_hidden_layers - layers
        torch.manual_seed(seed)
        self.parts = [self.around() for _ in range(layers)]
        self.fused, self.map = False, None

    def around(self):
        d = self.whole.config.hidden_size
        norms = [copy.deepcopy(self.whole.model.norm) for _ in range(3)]
        for norm in norms:
            norm.weight.data.add_(0.3 * torch.randn(d))
        return [norms[0], norms[1], torch.nn.Linear(2 * d, d, bias=False), norms[2]]

    def layer(self, i, tokens, hidden):
        token_norm, hidden_norm, proj, norm = self.parts[i]
        token = token_norm(self.target.get_input_embeddings()(torch.tensor([tokens])))
        state = hidden_norm(hidden[None])
        model = copy.copy(self.whole.model)
        model._modules = {**model._modules, "norm": norm}
        model.layers = torch.nn.ModuleList([self.whole.model.layers[self.first + i]])
        model.config = copy.deepcopy(self.whole.config)
        model.config.num_hidden_layers = 1
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[self.first + i :][:1]
        x = proj(torch.cat([state, token] if self.hidden_first else [token, state], -1))
        return model(inputs_embeds=x, use_cache=False).last_hidden_state[0]

    def write(self, folder, names, place):
        """The whole model's checkpoint, its last layers moved to `place`(i), and their parts.

        Returns the target: what transformers makes of the layers before.
        """
        self.whole.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        for i, modules in enumerate(self.parts):
            old = f"model.layers.{self.first + i}."
            for name in [n for n in weights if n.startswith(old)]:
                weights[place(i) + name[len(old) :]] = weights.pop(name)
            for part, module in zip(names, modules, strict=True):
                at = place(i).replace("layers.0.", "") if names is QWEN else place(i)
                weights[f"{at}{part}.weight"] = module.weight.detach()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        whole = config["num_hidden_layers"]
        for key, value in config.items():
            if isinstance(value, list) and len(value) == whole:
                config[key] = value[: self.first]
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": self.first}))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.target = model.eval()
        return model
