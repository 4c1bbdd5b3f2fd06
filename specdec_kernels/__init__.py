"""Speculative decoding kernels that make Hugging Face `generate` faster, with the same output."""

__version__ = "0.1.0"
