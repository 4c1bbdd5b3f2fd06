"""The kernels, usable alone. Each op is a folder: public function, reference, GPU kernel."""

from specdec_kernels.ops.commit_kv import commit_kv_

__all__ = ["commit_kv_"]
