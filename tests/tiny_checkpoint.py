"""A checkpoint folder for the commands: small enough to answer at once."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402


def tiny_checkpoint(folder):
    """A random model of 1500 positions and a byte-level tokenizer with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<end>")
    fast.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1500,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
