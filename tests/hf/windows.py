"""Verify forwards of a patched model by themselves: one of many slots, or many of one slot."""

import importlib

import torch

from specdec_kernels.cache import RaggedKV
from specdec_kernels.hf.cache import RaggedCache
from specdec_kernels.hf.model import CachedModel
from specdec_kernels.hf.support import cache_argument
from specdec_kernels.tree import ROOT_PARENT, DraftTree

engines = importlib.import_module("specdec_kernels.hf.patch")._engines


class Windows:
    """A batch behind its prefill; `logits` may be asked again and again from there.

    rows: prompts, one token list each; `continuations` [B, T] are what follows them.
    """

    def __init__(self, model, rows):
        self.model = model
        self.engine = engines[model]
        self.lens = [len(row) for row in rows]
        self.cached = CachedModel(
            model,
            self.engine.runner,
            len(rows),
            max(self.lens) + 80,
            torch.device("cpu"),
            self.engine.warn,
        )
        self.kv = self.cached.kv
        with torch.no_grad():
            self.cached.prefill_by(lambda inputs: self._prefill(rows), self.lens)

    def _prefill(self, rows):
        """Row by row: ragged rows need no padding here."""
        for b, row in enumerate(rows):
            single = RaggedKV(1, len(row) + 1, torch.device("cpu"))
            self._forward_prefill(torch.tensor([row]), RaggedCache(self.model, single, [len(row)]))
            for layer, keys in single.keys.items():
                values = single.values[layer]
                for store, new in ((self.kv.keys, keys), (self.kv.values, values)):
                    if layer not in store:
                        shape = (len(rows), new.shape[1], self.kv.capacity, new.shape[3])
                        store[layer] = new.new_full(shape, float("nan"))
                    store[layer][b, :, : len(row)] = new[0, :, : len(row)]

    def _forward_prefill(self, ids, cache):
        positions = torch.arange(ids.shape[1])
        options = {cache_argument(self.model): cache, "use_cache": True}
        if not hasattr(self.model, "_prefill"):
            options["cache_position"] = positions
        self.model(input_ids=ids, position_ids=positions[None], **options)

    def at_once(self, continuations):
        """Logits [B, T, V] of one forward over chains."""
        self.kv.set_lens(self.lens)
        return self._window(continuations)

    def one_by_one(self, continuations):
        """The same from forwards of one slot each, committed in turn."""
        self.kv.set_lens(self.lens)
        out = []
        for i in range(continuations.shape[1]):
            out.append(self._window(continuations[:, i : i + 1]))
            self.kv.set_lens([n + 1 for n in self.kv.lens])
        self.kv.set_lens(self.lens)
        return torch.cat(out, 1)

    def _window(self, tokens):
        size = tokens.shape[1]
        chain = [ROOT_PARENT, *range(size - 1)]
        tree = DraftTree.from_lists(tokens.tolist(), [chain] * len(tokens))
        self.kv.reserve(max(self.kv.lens) + size)
        with torch.no_grad():
            return self.cached.forward(tree)
