"""The network of an EAGLE head: a decoder layer over the next token and what the target thought.

Slot i of a head reads token i + 1 together with the target's hidden state of token i, and says
what follows token i + 1. Where the target has not been yet, the head's own output of the slot
before stands in for its hidden state.
Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" and
"EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test", 2024 and 2025.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_kernels.drafting.layers import Attention, LayerConfig, Mlp, Norm, Slots


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LayerConfig):
    """What the weights do not say.

    fused: EAGLE-3: `fc` joins hidden states of several layers of the target, and the first layer
        reads token and hidden state side by side. Otherwise EAGLE-1 and 2: `fc` joins the token and
        the target's last hidden state, and the output goes to the target's lm_head as it is.
    hidden_layers: ids of the target's hidden states, see `Drafter`.
    target_hidden_size: of one of them. num_layers: of the head itself.
    vocab_size, draft_vocab_size: of the target, and how many of its tokens can be drafted.
    norm_before_fc: one norm over all hidden states. fc_norm: one for each.
    norm_before_residual: the first residual is the normed hidden state.
    norm_output: the next slot is given the normed output.
    window: sliding window in positions. max_positions: None without a limit.
    """

    fused: bool
    hidden_layers: tuple[int, ...]
    target_hidden_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None
    max_positions: int | None = None


class Layer(nn.Module):
    def __init__(self, config: HeadConfig, index: int, names: Container[str]):
        super().__init__()
        self.first, self.config = index == 0, config
        if config.fused and self.first:
            self.hidden_norm = Norm(config.hidden_size, config.eps)
        if config.fused or not self.first:
            self.input_layernorm = Norm(config.hidden_size, config.eps)
        wide = 2 * config.hidden_size if config.fused and self.first else config.hidden_size
        self.self_attn = Attention(config, index, names, wide)
        self.post_attention_layernorm = Norm(config.hidden_size, config.eps)
        self.mlp = Mlp(config, index, names)

    def forward(self, embedded: Tensor, hidden: Tensor, slots: Slots) -> Tensor:
        residual = hidden
        if self.config.fused and self.first:
            hidden = self.hidden_norm(hidden)
            residual = hidden if self.config.norm_before_residual else residual
            hidden = torch.cat([self.input_layernorm(embedded), hidden], -1)
        elif not self.first:
            hidden = self.input_layernorm(hidden)
        residual = residual + self.self_attn(hidden, slots)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Head(nn.Module):
    """An EAGLE head without its weights: `load_state_dict(..., assign=True)` brings them.

    target_ids: target id of each draft id, int64 [Vd]; None means equal ids.
    """

    least_text = 2

    def __init__(self, config: HeadConfig, names: Container[str], target_ids: Tensor | None):
        super().__init__()
        self.config, self.target_ids = config, target_ids
        self.hidden_layers, self.max_positions = config.hidden_layers, config.max_positions
        self.carried, self.vocab_size = config.hidden_size, config.vocab_size
        d, eps = config.hidden_size, config.eps
        states = len(config.hidden_layers)
        wide = states * config.target_hidden_size
        self.fc = nn.Linear(
            wide if config.fused else 2 * d, d, bias="fc.bias" in names, device="meta"
        )
        if config.norm_before_fc:
            self.input_norm = Norm(wide, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                Norm(config.target_hidden_size, eps) for _ in range(states)
            )
        self.layers = nn.ModuleList(Layer(config, i, names) for i in range(config.num_layers))
        if config.fused:
            self.norm = Norm(d, eps)
        self.lm_head = nn.Linear(
            d, config.draft_vocab_size, bias="lm_head.bias" in names, device="meta"
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, d, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """What the target's hidden states [..., L * d_target] are to the layers: [..., d]."""
        config = self.config
        if not config.fused:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.split(config.target_hidden_size, -1)
            features = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(self, ids: Tensor, hidden: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """ids int64 [B, T], hidden [B, T, d]: what `lm_head` reads, and the next slots' hidden."""
        embedded = functional.embedding(ids, self.embed_tokens.weight)
        if not self.config.fused:
            hidden = self.fc(torch.cat([embedded, hidden], -1))
        for layer in self.layers:
            hidden = layer(embedded, hidden, slots)
        if not self.config.fused:
            return hidden, hidden
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden
