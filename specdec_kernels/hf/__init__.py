"""Everything that knows transformers."""

from specdec_kernels.hf.patch import metrics, patch, patched, save_profile, suffix_cache, unpatch
from specdec_kernels.hf.support import support

__all__ = ["metrics", "patch", "patched", "save_profile", "suffix_cache", "support", "unpatch"]
