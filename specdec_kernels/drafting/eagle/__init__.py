"""EAGLE heads: small layers that draft from the target's hidden states."""

from specdec_kernels.drafting.eagle.drafter import EagleDrafter
from specdec_kernels.drafting.eagle.network import Head, HeadConfig
from specdec_kernels.drafting.eagle.run import HeadRun

__all__ = ["EagleDrafter", "Head", "HeadConfig", "HeadRun"]
