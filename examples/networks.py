"""The networks that are trained, as `patch` will read them: from a target, with their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from specdec_kernels.drafting.eagle.network import Head, HeadConfig
from specdec_kernels.drafting.layers import Attention, Mlp, Norm, Slots

STEPS = {"eagle3": 3, "mtp": 2}


class Eagle3(Head):
    """An EAGLE-3 head of one layer with the norms of EAGLE-3.1, its tables taken from the target.

    draft_ids: target ids of the draft vocabulary, rising, int64 [Vd].
    """

    def __init__(self, target: Any, draft_ids: Tensor):
        config = _config(target, hidden_layers(target), len(draft_ids), fused=True)
        super().__init__(config, (), draft_ids)
        _start(self, target.config.get_text_config().initializer_range)
        del self.embed_tokens
        self.embed_tokens = target.get_input_embeddings()
        weight = target.get_output_embeddings().weight
        self.lm_head.weight.data.copy_(weight[draft_ids])
        self.fc.weight.data.zero_()  # of the three, the last state begins as the residual stream
        self.fc.weight.data[:, -self.config.hidden_size :] = torch.eye(self.config.hidden_size)

    @property
    def learnt_tables(self) -> list[nn.Parameter]:
        return [self.lm_head.weight]

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(out)

    def save(self, folder: Path, target: Any) -> None:
        """SafeAILab's layout, flags of EAGLE-3.1; all readers assume these hidden states."""
        ids = self.target_ids
        assert ids is not None
        config, text = self.config, target.config.get_text_config()
        weights = {
            name.replace("layers.0.", "midlayer."): value
            for name, value in self.state_dict().items()
            if not name.startswith("embed_tokens.")
        }
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        _write(
            folder,
            weights,
            {"d2t": ids - torch.arange(len(ids)), "t2d": t2d},
            _layer_config(text)
            | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "num_hidden_layers": 1,
                "draft_vocab_size": len(ids),
                "target_hidden_size": config.target_hidden_size,
                "fc_norm": True,
                "norm_output": True,
            },
        )


class Mtp(nn.Module):
    """A layer for multi-token prediction; its logits are the target's, read from draft_ids only."""

    learnt_tables: tuple[nn.Parameter, ...] = ()

    def __init__(self, target: Any, draft_ids: Tensor):
        super().__init__()
        text = target.config.get_text_config()
        self.config = _config(target, (text.num_hidden_layers,), len(draft_ids), fused=False)
        d, eps = self.config.hidden_size, self.config.eps
        self.token_layernorm, self.hidden_layernorm = Norm(d, eps), Norm(d, eps)
        self.input_proj = nn.Linear(2 * d, d, bias=False, device="meta")
        self.input_layernorm, self.post_attention_layernorm = Norm(d, eps), Norm(d, eps)
        self.self_attn = Attention(self.config, 0, (), d)
        self.mlp = Mlp(self.config, 0, ())
        self.final_layernorm = Norm(d, eps)
        _start(self, text.initializer_range)
        self.final_layernorm.weight.data.copy_(target.get_decoder().norm.weight)
        self.input_proj.weight.data.zero_()  # the hidden state begins as the residual stream
        self.input_proj.weight.data[:, d:] = torch.eye(d)
        self.target_ids = draft_ids
        self.tables = (  # no parameters of this module
            target.get_input_embeddings().weight,
            target.get_output_embeddings().weight[draft_ids].detach(),
        )

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def logits(self, out: Tensor) -> Tensor:
        return functional.linear(out, self.tables[1].to(out.dtype))

    def forward(self, ids: Tensor, hidden: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """As `Head.forward`."""
        embedded = functional.embedding(ids, self.tables[0])
        both = torch.cat([self.token_layernorm(embedded), self.hidden_layernorm(hidden)], -1)
        x = self.input_proj(both)
        x = x + self.self_attn(self.input_layernorm(x), slots)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out = self.final_layernorm(x)
        return out, out

    def save(self, folder: Path, target: Any) -> None:
        """The layout of speculators."""
        weights = {f"mtp_layers.0.{name}": value for name, value in self.state_dict().items()}
        _write(
            folder,
            weights,
            {},
            {
                "speculators_model_type": "mtp",
                "speculators_version": "0.9.0",
                "architectures": ["MTPDraftModel"],
                "num_nextn_predict_layers": 1,
                "transformer_layer_config": _layer_config(target.config.get_text_config()),
                "speculators_config": {
                    "algorithm": "mtp",
                    "default_proposal_method": "greedy",
                    "proposal_methods": [
                        {
                            "proposal_type": "greedy",
                            "speculative_tokens": STEPS["mtp"],
                            "verifier_accept_k": 1,
                            "accept_tolerance": 0.0,
                        }
                    ],
                    "verifier": {
                        "name_or_path": None,
                        "architectures": target.config.architectures,
                    },
                },
            },
        )


NETWORKS: dict[str, Any] = {"eagle3": Eagle3, "mtp": Mtp}


def hidden_layers(target: Any) -> tuple[int, ...]:
    """Those of an EAGLE-3 head that names none, as transformers counts."""
    n = target.config.get_text_config().num_hidden_layers
    return 2, n // 2, n - 3


def rope_theta(text: Any) -> float:
    """Of ordinary rotary embeddings, as transformers 5 and 4 have it."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise SystemExit(f"expected a model with ordinary rotary embeddings, got {kind}")
    return rope.get("rope_theta") or text.rope_theta


def _config(
    target: Any, hidden_layers: tuple[int, ...], draft_vocab_size: int, *, fused: bool
) -> HeadConfig:
    text = target.config.get_text_config()
    if text.model_type != "llama":
        raise SystemExit(f"expected a Llama, got {text.model_type}")
    dim = text.head_dim
    powers = torch.arange(0, dim, 2) / dim
    return HeadConfig(
        fused=fused,
        hidden_layers=hidden_layers,
        target_hidden_size=text.hidden_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=1,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=dim,
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_vocab_size,
        inv_freq=rope_theta(text) ** -powers,
        eps=text.rms_norm_eps,
        activation=text.hidden_act,
        fc_norm=fused,
        norm_output=fused,
    )


def _start(network: nn.Module, spread: float) -> None:
    """Norms of one, and nothing added to the residual stream yet."""
    network.to_empty(device="cpu")
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=spread)


def _layer_config(text: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "hidden_act": text.hidden_act,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_theta": rope_theta(text),
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
    }


def _write(
    folder: Path, weights: dict[str, Tensor], maps: dict[str, Tensor], config: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    halved = {name: value.detach().bfloat16().contiguous() for name, value in weights.items()}
    save_file(halved | maps, folder / "model.safetensors", metadata={"format": "pt"})
    settings = config | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
