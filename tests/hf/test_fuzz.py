"""Random settings, prompts and drafts: greedy text as plain, sampled text as without drafts."""

import functools

import pytest
import torch
from tiny import accelerated, batch, fresh, future_of, new_tokens, use_drafter, wrong
from transformers import LogitsProcessor

CASES, NEW = 16, 20


@functools.cache
def model(name):
    made = fresh(name)
    made.generation_config.presence_penalty = made.generation_config.frequency_penalty = None
    return made


class Parity(LogitsProcessor):
    """Odd tokens after even ones and the other way round, the last of them free."""

    specdec_stateless = True

    def __call__(self, input_ids, scores):
        token = torch.arange(scores.shape[-1])
        return scores.masked_fill((token + input_ids[:, -1:]) % 2 == 0, -torch.inf)

    def allowed_tokens(self, input_ids):
        odd = torch.tensor(0xAAAAAAAA - 2**32, dtype=torch.int32)
        return torch.where(input_ids[:, -1:] % 2 == 0, odd, ~odd).expand(-1, 3).contiguous()


class Dice:
    """Choices that a case's number decides."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, n):
        return int(torch.randint(n, (1,), generator=self.generator))

    def chance(self, share):
        return float(torch.rand(1, generator=self.generator)) < share

    def of(self, *values):
        return values[self.below(len(values))]

    def tokens(self, n):
        return torch.randint(2, 96, (n,), generator=self.generator).tolist()


def random_prompts(dice):
    """Ragged, with repetitions that a lookup finds."""
    pool = [dice.tokens(dice.of(1, 2, 5)) for _ in range(4)]
    return [
        [token for _ in range(1 + dice.below(6)) for token in dice.of(*pool)]
        for _ in range(dice.of(1, 1, 2, 4))
    ]


def random_settings(dice, text):
    """Processors that the kernels know or do not, from tokens that the text likes."""
    token = functools.partial(dice.of, *text)
    choices = dict(
        repetition_penalty=lambda: dice.of(0.7, 1.1, 1.6),
        no_repeat_ngram_size=lambda: dice.of(2, 3),
        bad_words_ids=lambda: [[token()], *([[token(), token()]] * dice.below(2))],
        suppress_tokens=lambda: [token(), token()],
        sequence_bias=lambda: (
            {(token(),): dice.of(-4.0, 2.0), (token(), token()): 1.0}
            if dice.chance(0.5)
            else {(token(),): 3.0}
        ),
        presence_penalty=lambda: dice.of(-0.5, 2.0),
        frequency_penalty=lambda: dice.of(0.25, 1.0),
        eos_token_id=token,
        min_new_tokens=lambda: dice.of(3, 12),
        forced_eos_token_id=token,
        logits_processor=lambda: [Parity()],
    )
    chosen = {name: make() for name, make in choices.items() if dice.chance(0.25)}
    if chosen.get("forced_eos_token_id") in chosen.get("suppress_tokens", ()):
        del chosen["suppress_tokens"]  # transformers refuses both
    if "logits_processor" in chosen:
        chosen.pop("forced_eos_token_id", None)  # one may forbid what the other forces
    return chosen


def random_drafts(dice, future):
    """Of the true future: cut, corrupted, with siblings, sometimes nothing."""

    def plan(b, text):
        true = future(b, text)[: dice.below(7)]
        chains = [[wrong(t) if dice.chance(0.2) else t for t in true] for _ in range(dice.below(4))]
        return [chain for chain in chains if chain]

    return plan


@pytest.mark.parametrize("case", range(CASES))
def test_fuzz(case, monkeypatch):
    dice = Dice(case)
    own = model(dice.of("phi3", "gpt2"))
    prompts = random_prompts(dice)
    inputs = batch(prompts)
    settings = random_settings(dice, new_tokens(own, inputs, max_new_tokens=8)[0])
    options = dict(max_new_tokens=NEW, **settings)
    size = dice.of(1, 4, 9, None)
    with accelerated(own, method="none", seed=case):
        # plain decoding ignores the penalties that transformers lacks
        penalties = {"presence_penalty", "frequency_penalty"} & settings.keys()
        expected = new_tokens(own, inputs, **options)
        drawn = new_tokens(own, inputs, do_sample=True, temperature=0.5, top_k=30, **options)
    if not penalties:
        assert new_tokens(own, inputs, **options) == expected
    for texts, sampled in (
        (expected, {}),
        (drawn, dict(do_sample=True, temperature=0.5, top_k=30)),
    ):
        with accelerated(own, seed=case, num_speculative_tokens=size):
            assert new_tokens(own, inputs, **options, **sampled) == texts
        future = future_of(prompts, texts)
        with monkeypatch.context() as patch:
            use_drafter(patch, random_drafts(dice, future))
            with accelerated(own, seed=case, num_speculative_tokens=size):
                assert new_tokens(own, inputs, **options, **sampled) == texts
            if sampled and len(prompts) == 1 and not penalties:
                torch.manual_seed(case)
                plain = new_tokens(own, inputs, **options, **sampled)
                torch.manual_seed(case)
                with accelerated(own, rng="torch", num_speculative_tokens=size):
                    assert new_tokens(own, inputs, **options, **sampled) == plain
