"""Everything that knows transformers."""

from specdec_kernels.hf.patch import metrics, patch, patched, suffix_cache, unpatch
from specdec_kernels.hf.support import support

__all__ = ["metrics", "patch", "patched", "suffix_cache", "support", "unpatch"]
