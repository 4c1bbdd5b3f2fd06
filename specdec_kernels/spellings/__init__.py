"""The options of vLLM, SGLang and llama.cpp as they are spelled, and what they are here.

Each engine has a table with one `Key` per option, and a `read` that turns options into a `Reading`:
settings in our names. Neither knows SpeculativeConfig: `Reading.resolve` is told which fields and
methods this version has.
"""

from specdec_kernels.spellings import llama_cpp, sglang, vllm
from specdec_kernels.spellings.reading import Reading

__all__ = ["Reading", "llama_cpp", "sglang", "vllm"]
