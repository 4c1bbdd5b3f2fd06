"""The network of DFlash: masked tokens behind the text that see it as the target does.

A block is the last committed token and block_size - 1 mask tokens. Its slots see each other and,
as further K and V of every layer, what the target's hidden states of all tokens before the block
are to that layer. Slot i says which token stands at its own position, i behind the first. Blocks
that are sampled from their anchor say it for the position behind, from the first slot on.
Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec_kernels.drafting.layers import Attention, LayerConfig, Mlp, Norm, Slots


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """What the weights do not say.

    hidden_layers: ids of the target's hidden states, see `Drafter`.
    target_hidden_size: of one of them.
    windows: per layer its sliding window in positions, None without one. causal: per layer whether
        a slot of the block sees only those before it.
    from_anchor: whether slots say what stands behind them.
    vocab_size, draft_vocab_size: of the target, and how many of its tokens can be drafted.
    logit_scale, softcap: logits are multiplied by the one, then capped by the other, if given.
    max_positions: None without a limit.
    """

    hidden_layers: tuple[int, ...]
    target_hidden_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    block_size: int
    mask_token_id: int
    vocab_size: int
    draft_vocab_size: int
    from_anchor: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    max_positions: int | None = None


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig, index: int, names: Container[str]):
        super().__init__()
        d, eps = config.hidden_size, config.eps
        self.input_layernorm = Norm(d, eps)
        self.self_attn = Attention(config, index, names, d)
        self.post_attention_layernorm = Norm(d, eps)
        self.mlp = Mlp(config, index, names)

    def forward(self, x: Tensor, slots: Slots) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), slots)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockNetwork(nn.Module):
    """DFlash without its weights.

    names: weights of the checkpoint. embed_tokens, lm_head: the target's, which stand in where the
        checkpoint has none. target_ids: target id of each draft id, int64 [Vd]; None: equal ids.
    """

    def __init__(
        self,
        config: BlockConfig,
        names: Container[str],
        embed_tokens: nn.Module,
        lm_head: nn.Module,
        target_ids: Tensor | None = None,
    ):
        super().__init__()
        self.config, self.target_ids = config, target_ids
        d, eps = config.hidden_size, config.eps
        wide = len(config.hidden_layers) * config.target_hidden_size
        self.fc = nn.Linear(wide, d, bias="fc.bias" in names, device="meta")
        self.hidden_norm = Norm(d, eps)
        self.layers = nn.ModuleList(BlockLayer(config, i, names) for i in range(len(config.causal)))
        self.norm = Norm(d, eps)
        if "embed_tokens.weight" in names:
            embed_tokens = nn.Embedding(config.vocab_size, d, device="meta")
        if "lm_head.weight" in names:
            lm_head = nn.Linear(d, config.draft_vocab_size, bias=False, device="meta")
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    @property
    def drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.config.block_size - (not self.config.from_anchor)

    def keys_values(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V [B, T, Hkv, D] of every layer from the target's hidden states [B, T, L * d]."""
        states = self.hidden_norm(self.fc(features))
        layers: list[Any] = list(self.layers)
        return [layer.self_attn.keys_values(states, positions) for layer in layers]

    def block_of(self, roots: Tensor) -> Tensor:
        """Token ids [B, block_size] from the last committed tokens [B]."""
        ids = roots.new_full((len(roots), self.config.block_size), self.config.mask_token_id)
        ids[:, 0] = roots
        return ids

    def forward(self, ids: Tensor, slots: Slots) -> Tensor:
        """What `lm_head` reads, [B, T, d], from blocks int64 [B, T]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, slots)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        config = self.config
        logits = self.lm_head(states)[..., : config.draft_vocab_size] * config.logit_scale
        if config.softcap is not None:
            logits = config.softcap * torch.tanh(logits / config.softcap)
        return logits
