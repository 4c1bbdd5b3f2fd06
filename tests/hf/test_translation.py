"""Draft models with other tokenizers, through generate."""

import pytest
from small_tokenizers import NASTY, TEXTS, small_tokenizer
from tiny import accelerated, batch, fresh, new_tokens

WAYS = ("text", "intersection")


def model_of(name, family="llama", **settings):
    """A model with as many tokens as the tokenizer has."""
    return fresh(family, vocab_size=len(small_tokenizer(name)), **settings)


def with_tokenizers(target, draft):
    return dict(tokenizer=small_tokenizer(target), draft_tokenizer=small_tokenizer(draft))


def prompts(name, *texts):
    return [small_tokenizer(name).encode(text) for text in texts]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "target, draft",
    [
        ("bytes", "bytes2"),
        ("bytes", "pieces"),
        ("pieces", "bytes2"),
        ("pieces2", "pieces"),
        ("bytes2", "words"),
        ("words", "bytes"),
        ("pieces", "wordpiece"),
        ("wordpiece", "pieces2"),
    ],
)
def test_c18_greedy_text_is_that_of_the_target(target, draft, way):
    """Random text: bytes that are no characters, special tokens in the middle, texts in a row."""
    model = model_of(target)
    rows = prompts(target, TEXTS[0][:40], NASTY[1] + TEXTS[2][:50], NASTY[7])
    for inputs in (batch(rows[1:2]), batch(rows)):
        expected = new_tokens(model, inputs)
        for size in (5, None):
            with accelerated(
                model,
                model=model_of(draft, "qwen3"),
                draft_translation=way,
                num_speculative_tokens=size,
                **with_tokenizers(target, draft),
            ) as metrics:
                assert new_tokens(model, inputs) == expected
            if size is not None:
                print(
                    way,
                    target,
                    draft,
                    metrics.num_draft_tokens,
                    metrics.num_drafts,
                    metrics.num_accepted_tokens,
                )
