"""The kernels, usable alone. Each op is a folder: public function, reference, GPU kernel."""

from specdec_kernels.ops.build_tree import build_tree
from specdec_kernels.ops.commit_kv import commit_kv_
from specdec_kernels.ops.linear_small_m import linear_small_m
from specdec_kernels.ops.ngram_lookup import ngram_lookup
from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.rms_norm import rms_norm
from specdec_kernels.ops.sample import sample
from specdec_kernels.ops.topk_logprobs import topk_logprobs
from specdec_kernels.ops.tree_attention import tree_attention
from specdec_kernels.ops.verify_greedy import verify_greedy

__all__ = [
    "build_tree",
    "commit_kv_",
    "linear_small_m",
    "ngram_lookup",
    "rejection_sample",
    "rms_norm",
    "sample",
    "topk_logprobs",
    "tree_attention",
    "verify_greedy",
]
