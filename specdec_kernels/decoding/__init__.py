"""The loop: propose, verify, accept, commit. It knows ops and drafters, but not transformers."""

from specdec_kernels.decoding.loop import Loop

__all__ = ["Loop"]
