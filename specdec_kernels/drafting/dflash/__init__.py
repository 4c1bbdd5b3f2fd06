"""DFlash and DSpark: a small network that fills a block of masked tokens in one forward."""

from specdec_kernels.drafting.dflash.drafter import DFlashDrafter
from specdec_kernels.drafting.dflash.markov import DSparkDrafter, DSparkNetwork
from specdec_kernels.drafting.dflash.network import BlockConfig, BlockNetwork
from specdec_kernels.drafting.dflash.run import BlockRun

__all__ = [
    "BlockConfig",
    "BlockNetwork",
    "BlockRun",
    "DFlashDrafter",
    "DSparkDrafter",
    "DSparkNetwork",
]
