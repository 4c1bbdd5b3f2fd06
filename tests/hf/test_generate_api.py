"""The arguments of generate and the ways to call it: same tokens, or one warning and plain."""

import warnings

import pytest
import torch
from tiny import (
    accelerated,
    batch,
    char_tokenizer,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    random_rows,
    use_drafter,
)
from transformers import DynamicCache, StaticCache, pipeline

import specdec_kernels as sdk
from specdec_kernels.decoding.controller import Controller


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


def drafts_right(monkeypatch, prompts, texts, length=6):
    return use_drafter(monkeypatch, lambda b, text: [future_of(prompts, texts)(b, text)[:length]])


@pytest.mark.parametrize("limit", range(1, 8))
def test_lengths(model, rows, limit, monkeypatch):
    """C02: exactly as many tokens as asked for, whatever was accepted."""
    inputs = batch(rows)
    width = inputs["input_ids"].shape[1]
    texts = new_tokens(model, inputs)
    expected = [text[:limit] for text in texts]
    with accelerated(model, num_speculative_tokens=6):
        assert new_tokens(model, inputs, max_new_tokens=limit) == expected
        options = dict(max_new_tokens=None, max_length=width + limit)
        assert new_tokens(model, inputs, **options) == expected
    drafts_right(monkeypatch, rows, texts)
    with accelerated(model, num_speculative_tokens=6) as metrics:
        assert new_tokens(model, inputs, max_new_tokens=limit) == expected
    assert metrics.num_new_tokens == 3 * limit


def test_eos_in_the_middle_of_blocks(model, rows, monkeypatch):
    """D01: rows end at different times; each of the first twenty tokens is declared the EOS."""
    inputs = batch(rows)
    texts = new_tokens(model, inputs)
    drafts_right(monkeypatch, rows, texts)
    for pos in range(20):
        eos = [texts[pos % 3][pos], texts[0][20 - pos]][: 1 + pos % 2]
        kept = [next((i for i, t in enumerate(r[:23]) if t in eos), 23) + 1 for r in texts]
        expected = [(r[:n] + [0] * 24)[: max(kept)] for r, n in zip(texts, kept, strict=True)]
        if pos < 4:
            assert new_tokens(model, inputs, max_new_tokens=24, eos_token_id=eos) == expected
        with accelerated(model, num_speculative_tokens=6) as metrics:
            assert new_tokens(model, inputs, max_new_tokens=24, eos_token_id=eos) == expected
        assert metrics.num_new_tokens == sum(kept)


def test_eos_in_the_prompt_ends_a_draft(model, rows):
    """C03: a match in front of an EOS; nothing behind the EOS is drafted."""
    text = new_tokens(model, batch(rows[2:]))[0]
    eos = text[6]
    prompt = [*rows[2], *text[:12], *rows[2][-5:]]
    inputs = batch([prompt])
    expected = new_tokens(model, inputs, eos_token_id=eos)
    with accelerated(model, num_speculative_tokens=8):
        assert new_tokens(model, inputs, eos_token_id=eos) == expected


def test_padding_when_rows_end_early(model, rows):
    inputs = batch(rows)
    texts = new_tokens(model, inputs)
    eos = texts[1][3]
    for pad in (0, 93):
        options = dict(eos_token_id=eos, pad_token_id=pad, do_sample=False, max_new_tokens=30)
        expected = model.generate(**inputs, **options)
        with accelerated(model):
            assert torch.equal(model.generate(**inputs, **options), expected)


def run_plain_cases(inputs):
    width = inputs["input_ids"].shape[1]
    return {
        "use_cache=False": dict(use_cache=False),
        "cache_implementation": dict(cache_implementation="static"),
        "beam search": dict(num_beams=2),
        "assisted generation": dict(prompt_lookup_num_tokens=4, eos_token_id=95),
        "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
        "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
        "chunked prefill": dict(prefill_chunk_size=8),
        "position_ids": dict(position_ids=torch.arange(3, 3 + width)[None]),
    }


@pytest.mark.parametrize("reason", run_plain_cases(batch([[1, 2]])))
def test_what_runs_plain_warns_once(reason, rows):
    """D06 and the rest of what the loop does not do."""
    model = fresh("phi3", attn_implementation="eager")
    inputs = batch(rows[:1])
    options = dict(do_sample=False, max_new_tokens=12, **run_plain_cases(inputs)[reason])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.generate(**inputs, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sdk.patch(model)
        for _ in range(2):
            got = model.generate(**inputs, **options)
            assert torch.equal(sequences(got), sequences(expected))
    ours = [str(w.message) for w in caught if "specdec_kernels" in str(w.message)]
    assert len(ours) == 1 and reason in ours[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train()
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
        model.eval()
    assert any("training mode" in str(w.message) for w in caught)
    sdk.unpatch(model)


def sequences(output):
    return getattr(output, "sequences", output)


def test_config_without_a_cache():
    model = fresh("phi3")
    inputs = batch(random_rows((7,)))
    expected = new_tokens(model, inputs)
    model.config.use_cache = model.generation_config.use_cache = False
    sdk.patch(model)
    with pytest.warns(UserWarning, match="use_cache=False"):
        assert new_tokens(model, inputs) == expected
    sdk.unpatch(model)


def test_inputs_embeds(model):
    ids = torch.tensor(random_rows((7,)))
    options = dict(inputs_embeds=model.get_input_embeddings()(ids), do_sample=False)
    expected = model.generate(**options, max_new_tokens=12)
    sdk.patch(model)
    with pytest.warns(UserWarning, match="inputs_embeds"):
        assert torch.equal(model.generate(**options, max_new_tokens=12), expected)
    sdk.unpatch(model)


def test_extra_model_inputs():
    """token_type_ids change every forward of GPT-2, so a verify forward must not lose them."""
    model = fresh("gpt2")
    inputs = batch(lookup_rows(model))
    inputs["token_type_ids"] = torch.full_like(inputs["input_ids"], 5)
    expected = new_tokens(model, inputs)
    sdk.patch(model, num_speculative_tokens=8)
    with pytest.warns(UserWarning, match="token_type_ids"):
        assert new_tokens(model, inputs) == expected
    sdk.unpatch(model)


def test_position_ids_that_generate_would_make_itself(model, rows):
    inputs = batch(rows)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = new_tokens(model, inputs)
    with warnings.catch_warnings(), sdk.patched(model, num_speculative_tokens=8):
        warnings.simplefilter("ignore")
        assert new_tokens(model, inputs) == expected


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_of_the_callers_own(model, rows, static):
    """B06, B09: two turns of a chat, the second on the filled cache."""
    inputs = batch(rows[:1])

    def turns():
        cache = StaticCache(config=model.config, max_cache_len=256) if static else DynamicCache()
        ids = inputs["input_ids"]
        for _ in range(2):
            options = dict(past_key_values=cache, max_new_tokens=12, do_sample=False)
            ids = model.generate(ids, **options)
            ids = torch.cat([ids, torch.tensor([[5, 6, 7]])], 1)
        return ids

    expected = turns()
    with warnings.catch_warnings(), sdk.patched(model):
        warnings.simplefilter("ignore")
        assert torch.equal(turns(), expected)


def test_a_second_turn_on_the_returned_output(model, rows):
    def turns():
        out = model.generate(
            **batch(rows[:1]), max_new_tokens=9, do_sample=False, return_dict_in_generate=True
        )
        ids = torch.cat([out.sequences, torch.tensor([[5, 6, 7]])], 1)
        cache = out.past_key_values
        return model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)

    expected = turns()
    with warnings.catch_warnings(), sdk.patched(model):
        warnings.simplefilter("ignore")
        assert torch.equal(turns(), expected)


def test_a_patched_model_as_assistant(model, rows):
    helper = fresh("phi3")
    inputs = batch(rows[:1])
    expected = new_tokens(model, inputs)
    with accelerated(helper) as metrics:
        assert new_tokens(model, inputs, assistant_model=helper) == expected
    assert metrics.num_new_tokens == 0
    sdk.patch(model)
    with pytest.warns(UserWarning, match="assisted generation"):
        assert new_tokens(model, inputs, assistant_model=helper) == expected
    sdk.unpatch(model)


def test_generation_config_of_a_downloaded_model(rows):
    """A13, D05: sampling settings left in a config that decodes greedily."""
    model = fresh("phi3")
    inputs = batch(rows)
    expected = new_tokens(model, inputs, repetition_penalty=1.05)
    defaults = dict(do_sample=False, temperature=0.0, top_p=0.9, top_k=5, repetition_penalty=1.05)
    for key, value in defaults.items():
        setattr(model.generation_config, key, value)
    with accelerated(model, num_speculative_tokens=8) as metrics:
        out = model.generate(**inputs, max_new_tokens=48)
    assert out[:, inputs["input_ids"].shape[1] :].tolist() == expected
    assert metrics.num_draft_tokens > 0


def test_pipelines(model):
    tokenizer = char_tokenizer()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["abcabcab", "hello, hello, hel", "xyz 0 1 0 1"]
    options = dict(do_sample=False, max_new_tokens=24, batch_size=3)
    expected = generator(prompts, **options)
    with accelerated(model) as metrics:
        assert generator(prompts, **options) == expected
    assert metrics.num_new_tokens >= 3 * 24


def test_num_return_sequences(model, rows):
    inputs = batch(rows)
    width = inputs["input_ids"].shape[1]
    torch.manual_seed(0)
    with accelerated(model) as metrics:
        out = model.generate(
            **inputs, do_sample=True, temperature=2.0, num_return_sequences=4, max_new_tokens=10
        )
    assert out.shape == (12, width + 10)
    assert torch.equal(out[:, :width], inputs["input_ids"].repeat_interleave(4, 0))
    assert len({tuple(row) for row in out.tolist()}) == 12
    assert metrics.num_new_tokens == 120


def test_prompts_without_a_mask_and_in_inference_mode(model):
    ids = torch.tensor(random_rows((8, 8)))
    expected = model.generate(ids, do_sample=False, max_new_tokens=20)
    with accelerated(model), torch.inference_mode():
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=20), expected)


def test_right_padding_runs_plain(model):
    inputs = batch([[5, 6, 7, 8], [9, 5, 6, 7]])
    inputs["attention_mask"][0, 3] = 0
    expected = new_tokens(model, inputs)
    sdk.patch(model)
    with pytest.warns(UserWarning, match="not left-padded"):
        assert new_tokens(model, inputs) == expected
    sdk.unpatch(model)


def test_bad_prompts(model):
    with accelerated(model):
        inputs = batch([[5, 6, 7], [5]])
        inputs["attention_mask"][1] = 0
        with pytest.raises(ValueError, match="at least one token in every prompt"):
            new_tokens(model, inputs)
        inputs = batch(random_rows((513,)))
        with pytest.raises(ValueError, match=r"at most 512 tokens.*got 513"):
            new_tokens(model, inputs)
        with pytest.raises((ValueError, RuntimeError)):
            model.generate(torch.empty(1, 0, dtype=torch.int64), max_new_tokens=3)
        with pytest.raises((TypeError, RuntimeError)):
            model.generate(torch.ones(1, 4) / 2, max_new_tokens=3)


def test_a_generous_length_costs_nothing(model, rows):
    """Buffers grow with the text, not with the limit."""
    inputs = batch(rows[:1])
    eos = new_tokens(model, inputs)[0][9]
    expected = new_tokens(model, inputs, eos_token_id=eos)
    with accelerated(model):
        assert new_tokens(model, inputs, eos_token_id=eos, max_new_tokens=10**10) == expected


def test_forward_hooks_and_counts(model, rows, monkeypatch):
    """D03: the size that was asked for, in every call; nothing is left in a config."""
    inputs = batch(rows[:1])
    texts = new_tokens(model, inputs, max_new_tokens=43)
    before = model.config.to_dict(), model.generation_config.to_dict()
    drafts_right(monkeypatch, rows[:1], texts, 48)
    for k in (1, 6):
        for _ in range(2):
            calls = []
            hook = model.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
            with accelerated(model, num_speculative_tokens=k):
                assert new_tokens(model, inputs, max_new_tokens=43) == texts
            hook.remove()
            assert len(calls) == 1 + 42 // (k + 1)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before


def test_ids_stay_in_the_vocabulary(rows):
    """B21: whatever fills up a window is a real token id and a real position."""
    model = fresh("gpt2")
    inputs = batch([*rows, [5]])
    eos = new_tokens(model, inputs)[1][3]
    expected = new_tokens(model, inputs, eos_token_id=eos)
    seen = []
    for module in (model.transformer.wte, model.transformer.wpe):
        module.register_forward_pre_hook(
            lambda m, args: seen.append((int(args[0].min()), int(args[0].max()), m.num_embeddings))
        )
    with accelerated(model, num_speculative_tokens=8):
        assert new_tokens(model, inputs, eos_token_id=eos) == expected
    assert all(low >= 0 and high < size for low, high, size in seen)


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("new", [15, 16])
def test_the_end_of_the_position_table(name, new, monkeypatch):
    """B18: drafts may not reach beyond the last learned position."""
    sizes = dict(n_positions=24) if name == "gpt2" else dict(max_position_embeddings=24)
    model = fresh(name, **sizes)
    prompts = random_rows((9, 4))
    inputs = batch(prompts)
    texts = new_tokens(model, inputs, max_new_tokens=new)
    with accelerated(model, num_speculative_tokens=8):
        assert new_tokens(model, inputs, max_new_tokens=new) == texts
    drafts_right(monkeypatch, prompts, texts, 8)
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs, max_new_tokens=new) == texts
    assert metrics.num_accepted_tokens > 0


def test_16_bit_models_run(rows):
    for dtype in (torch.bfloat16, torch.float16):
        model = fresh("phi3").to(dtype)
        with accelerated(model) as metrics:
            out = new_tokens(model, batch(rows))
        assert all(0 <= t < 96 for row in out for t in row) and metrics.num_steps > 0


def test_gradients_stay_possible(model, rows):
    with accelerated(model):
        new_tokens(model, batch(rows), max_new_tokens=8)
        model(**batch(rows)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad(set_to_none=True)


def test_a_number_of_tokens_per_batch_size(model, rows):
    """Rows that have finished no longer count."""
    inputs = batch(rows)
    plain = new_tokens(model, inputs)
    eos = plain[0][5]
    options = dict(eos_token_id=eos, pad_token_id=0)
    expected = new_tokens(model, inputs, **options)
    assert len({row.index(eos) if eos in row else len(row) for row in expected}) > 1
    windows = []
    original = Controller.draft_size

    def draft_size(self, size, confidence, running=None):
        windows.append((running, original(self, size, [4] * size, running)))
        return original(self, size, confidence, running)

    table = [[1, 1, 5], [2, 2, 1], [3, 9, 0]]
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Controller, "draft_size", draft_size)
        with accelerated(model, num_speculative_tokens_per_batch_size=table) as metrics:
            assert new_tokens(model, inputs, **options) == expected
    assert {(3, 0)} < set(windows) <= {(3, 0), (2, 1), (1, 5)}
    assert metrics.num_draft_tokens > 0
