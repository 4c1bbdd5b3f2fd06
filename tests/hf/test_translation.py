"""Draft models with other tokenizers, through generate."""

import importlib

import pytest
import torch
from small_tokenizers import NASTY, TEXTS, letters, small_tokenizer
from test_draft_model import noisy
from test_sampling import FALSE_ALARM, PLAIN, SMALL, WARPED, draw, joints, pvalues
from tiny import accelerated, batch, fresh, new_tokens
from transformers import PreTrainedTokenizerBase

import specdec_kernels as sdk
from specdec_kernels.cli.draft_checks import check_model
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.drafting.intersection import Intersection
from specdec_kernels.drafting.transcript import TextTranslation

engines = importlib.import_module("specdec_kernels.hf.patch")._engines
WAYS = ("text", "intersection")


def model_of(name, family="llama", **settings):
    """A model with as many tokens as the tokenizer has."""
    return fresh(family, **{"vocab_size": len(small_tokenizer(name)), **settings})


def tokenizers_of(target, draft):
    return dict(tokenizer=small_tokenizer(target), draft_tokenizer=small_tokenizer(draft))


def prompts(name, *texts):
    return [small_tokenizer(name).encode(text) for text in texts]


@pytest.fixture
def windows(monkeypatch):
    """The drafted windows of every step."""
    seen, propose = [], Loop.propose

    def spied(self, active):
        confidence, tree = propose(self, active)
        seen.append(tree)
        return confidence, tree

    monkeypatch.setattr(Loop, "propose", spied)
    return seen


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
def test_c18_greedy_text_is_that_of_the_target(target, draft, way, windows):
    """Random text: bytes that are no characters, special tokens in the middle, ragged rows.

    With positions of the draft model's own, where transformers' UAG crashed (its PR #46124).
    """
    model, vocab = model_of(target), len(small_tokenizer(target))
    rows = prompts(target, TEXTS[0][:40], NASTY[1] + TEXTS[2][:50], NASTY[7])
    family = "gpt2" if target == "bytes" else "qwen3"
    options = dict(model=model_of(draft, family), draft_translation=way)
    for inputs, size in ((batch(rows[1:2]), 5), (batch(rows), 4), (batch(rows), None)):
        expected = new_tokens(model, inputs, max_new_tokens=32)
        options["num_speculative_tokens"] = size
        with accelerated(model, **options, **tokenizers_of(target, draft)):
            assert new_tokens(model, inputs, max_new_tokens=32) == expected
    drafted = torch.cat([tree.draft_token_ids.flatten() for tree in windows])
    assert int(drafted.min()) >= 0 and int(drafted.max()) < vocab
    assert any(max(tree.drafted_depth()) > 0 for tree in windows)


def renamed(model, target, draft):
    """The model with its tokens where another tokenizer has those of the same bytes."""
    with sdk.patched(
        fresh("llama", vocab_size=len(small_tokenizer(target))),
        model=fresh("llama", vocab_size=len(small_tokenizer(draft))),
        draft_translation="intersection",
        **tokenizers_of(target, draft),
    ) as any_model:
        pairs = engines[any_model].draft.translation.pairs
    out = fresh("llama", vocab_size=len(small_tokenizer(draft)))
    weights = {k: v for k, v in model.state_dict().items() if "embed" not in k and "head" not in k}
    out.load_state_dict(weights, strict=False)
    its, own = torch.tensor(list(pairs.items())).T
    for name in ("get_input_embeddings", "get_output_embeddings"):
        table, source = getattr(out, name)().weight.data, getattr(model, name)().weight.data
        table[own] = source[its]
    return out


@pytest.mark.parametrize("way", WAYS)
def test_c18_padded_vocabularies(way, windows):
    """Ids without a token, in both models: they stand for no text, and are not drafted as text."""
    sizes = len(small_tokenizer("bytes2")) + 80, len(small_tokenizer("pieces2")) + 80
    model, draft = model_of("bytes2", vocab_size=sizes[0]), model_of("pieces2", vocab_size=sizes[1])
    inputs = batch(prompts("bytes2", TEXTS[0][:40], "a"))
    for table in (model.lm_head, draft.lm_head):
        table.weight.data[-80:] *= 2  # so that they are written
    expected = new_tokens(model, inputs)
    assert max(max(row) for row in expected) >= sizes[0] - 80
    options = dict(model=draft, draft_translation=way, num_speculative_tokens=4)
    with accelerated(model, **options, **tokenizers_of("bytes2", "pieces2")):
        assert new_tokens(model, inputs) == expected
    drafted = [
        token
        for tree in windows
        for row, n in zip(tree.draft_token_ids.tolist(), tree.num_nodes.tolist(), strict=True)
        for token in row[1:n]
    ]
    assert drafted and max(drafted) < sizes[0] - 80


@pytest.mark.parametrize("options", [{}, dict(draft_tree_topk=3)], ids=["chain", "tree"])
def test_b05_the_target_with_other_ids_is_always_right(options):
    """By the tokens in common, which are all; what is accepted is read once."""
    target = model_of("bytes")
    draft = renamed(target, "bytes", "shuffled")
    inputs = batch(prompts("bytes", TEXTS[0][:40], NASTY[1] + TEXTS[2][:50], "a"))
    expected = new_tokens(target, inputs, max_new_tokens=60)
    options = dict(draft_translation="intersection", num_speculative_tokens=6, **options)
    with accelerated(
        target, model=draft, **options, **tokenizers_of("bytes", "shuffled")
    ) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=60) == expected
    if not options.get("draft_tree_topk"):
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 100
    assert metrics.mean_acceptance_length > 2.5


def test_text_of_a_copy_with_other_ids_is_often_right():
    """Not always: a random model's tokens are not those that its tokenizer writes."""
    target = model_of("bytes")
    draft = renamed(target, "bytes", "shuffled")
    inputs = batch(prompts("bytes", TEXTS[0][:40], TEXTS[2][:50], "a"))
    expected = new_tokens(target, inputs, max_new_tokens=60)
    options = dict(draft_translation="text", num_speculative_tokens=4)
    with accelerated(
        target, model=draft, **options, **tokenizers_of("bytes", "shuffled")
    ) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=60) == expected
    assert metrics.num_accepted_tokens > 10


@pytest.mark.parametrize(
    "options, rule, settings",
    [
        (dict(draft_sample_method="probabilistic"), "token", "warped"),
        (dict(draft_sample_method="probabilistic"), "block", "plain"),
        (dict(draft_sample_method="probabilistic"), "coupled", "warped"),
        (dict(draft_sample_method="probabilistic"), "auto", "plain"),
        ({}, "block", "warped"),
        ({}, "auto", "plain"),
        (dict(draft_tree_topk=2, num_speculative_tokens=5), "token", "plain"),
        (dict(draft_translation="text"), "auto", "warped"),
        (dict(draft_translation="text"), "token", "plain"),
    ],
)
def test_a01_c13_exact_joint(options, rule, settings):
    """Draft tokens of which the target lacks some, and the other way round, at other ids."""
    model = fresh("llama", **SMALL)
    target, draft = letters("abcdefgh"), letters("xhgyedcbz")
    other = fresh("llama", **{**SMALL, "vocab_size": 9})
    torch.manual_seed(6)
    options = {
        "draft_translation": "intersection",
        "num_speculative_tokens": 3,
        "rule": rule,
        **options,
    }
    near = noisy(model, 0.2)
    other.load_state_dict(
        {k: v for k, v in near.state_dict().items() if v.shape[:1] != (8,)}, strict=False
    )
    for i, letter in enumerate("xhgyedcbz"):
        if letter in "abcdefgh":
            for name in ("get_input_embeddings", "get_output_embeddings"):
                row = getattr(near, name)().weight.data["abcdefgh".index(letter)]
                getattr(other, name)().weight.data[i] = row
    tokenizers = dict(tokenizer=target, draft_tokenizer=draft)
    with accelerated(model, model=other, **tokenizers, **options) as metrics:
        counts = draw(model, 8_400, **(WARPED if settings == "warped" else PLAIN))
    assert 0.05 < metrics.acceptance_rate < 0.98
    assert min(pvalues(counts, joints(settings))) > FALSE_ALARM


def test_auto_takes_common_tokens_where_they_suffice_or_drafts_are_drawn():
    target = model_of("bytes")

    def way(draft, **options):
        with sdk.patched(target, model=model_of(draft), **tokenizers_of("bytes", draft), **options):
            return type(engines[target].draft.translation)

    assert way("bytes") is type(None)
    assert way("bytes", draft_translation="text") is type(None)
    assert way("shuffled") is Intersection
    assert way("pieces") is TextTranslation
    assert way("pieces", draft_sample_method="probabilistic") is Intersection
    assert way("pieces", draft_tree_topk=2) is Intersection


@pytest.mark.parametrize("way", WAYS)
def test_c22_each_models_end_of_text(way, windows):
    """A draft model that only says its own: the target's is drafted, under another id."""
    target, draft = model_of("bytes"), model_of("pieces", "qwen3")
    torch.nn.init.zeros_(draft.lm_head.weight)
    bias = 9.0 * torch.nn.functional.one_hot(torch.tensor(2), len(small_tokenizer("pieces")))
    draft.lm_head.bias = torch.nn.Parameter(bias)
    inputs = batch(prompts("bytes", TEXTS[0][:40], NASTY[1]))
    end = small_tokenizer("bytes").eos_token_id
    options = dict(model=draft, draft_translation=way, num_speculative_tokens=4)
    settings = dict(eos_token_id=end, max_new_tokens=24)
    expected = new_tokens(target, inputs, **settings)
    with accelerated(target, **options, **tokenizers_of("bytes", "pieces")) as metrics:
        assert new_tokens(target, inputs, **settings) == expected
    ends = {
        int(tree.draft_token_ids[b, n - 1])
        for tree in windows
        for b, n in enumerate(tree.num_nodes.tolist())
        if n > 1
    }
    assert ends == {end} and metrics.num_drafts > 10


@pytest.mark.parametrize("way", WAYS)
def test_b18_the_end_of_the_draft_models_positions(way):
    """Its own tokens count, which are more or fewer than the target's."""
    target = model_of("bytes")
    inputs = batch(prompts("bytes", TEXTS[0][:40], "a"))
    expected = new_tokens(target, inputs)
    options = dict(draft_translation=way, num_speculative_tokens=6)
    for name, limit in (("pieces", 24), ("words", 24), ("bytes2", 3)):
        draft = model_of(name, max_position_embeddings=limit)
        positions = []

        def hook(module, args, given, positions=positions):
            positions.append(int(given.get("position_ids", args[-1]).max()))

        with accelerated(target, model=draft, **options, **tokenizers_of("bytes", name)):
            draft.model.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)
            assert new_tokens(target, inputs) == expected
        assert max(positions, default=0) < limit


def test_tokenizers_that_lie_with_the_models(tmp_path):
    """With vLLM's JSON; and given as folders."""
    for name in ("bytes", "pieces"):
        model_of(name).save_pretrained(tmp_path / name)
        small_tokenizer(name).save_pretrained(tmp_path / name)
    target = type(model_of("bytes")).from_pretrained(tmp_path / "bytes")
    inputs = batch(prompts("bytes", TEXTS[0][:40]))
    expected = new_tokens(model_of("bytes"), inputs)
    config = {"model": str(tmp_path / "pieces"), "num_speculative_tokens": 3}
    for extra, kind in (({"use_heterogeneous_vocab": True}, Intersection), ({}, TextTranslation)):
        with accelerated(target, config={**config, **extra}):
            draft = engines[target].draft
            assert isinstance(draft.translation, kind)
            assert check_model(draft, target)[0].detail.startswith("another one, 393 tokens here")
            assert new_tokens(target, inputs) == expected
    target, folders = model_of("bytes"), {"tokenizer": tmp_path / "bytes"}
    folders["draft_tokenizer"] = str(tmp_path / "pieces")
    with accelerated(target, model=model_of("pieces"), **folders):
        assert new_tokens(target, inputs) == expected


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(draft_translation="words"), ValueError, "one of intersection, text, got 'words'"),
        (
            dict(draft_translation="text", draft_tree_topk=2),
            ValueError,
            "draft_tree_topk: expected 1 with draft_translation='text', got 2",
        ),
        (
            dict(draft_translation="text", draft_sample_method="probabilistic"),
            ValueError,
            "draft_sample_method: expected greedy with draft_translation='text'",
        ),
        (dict(draft_translation="text"), ValueError, "tokenizer: expected one, as none lies"),
        (dict(tokenizer="bytes"), ValueError, "draft_tokenizer: expected one, as none lies"),
        (dict(tokenizer=3), TypeError, "tokenizer: expected a tokenizer, a folder or a Hub id"),
        (dict(draft_tokenizer="/no/such"), ValueError, "draft_tokenizer: .* got '/no/such'"),
        (
            dict(tokenizer=letters("ab"), draft_tokenizer=letters("xy"), draft_tree_topk=2),
            ValueError,
            "draft_translation: expected a draft model with some of the target's tokens",
        ),
    ],
    ids=str,
)
def test_what_is_refused(options, error, message):
    target = model_of("bytes")
    if options.get("tokenizer") == "bytes":
        options = {**options, "tokenizer": small_tokenizer("bytes")}
    with pytest.raises(error, match=message):
        sdk.patch(target, model=model_of("pieces"), **options)
    with pytest.raises(ValueError, match="expected a patched model"):
        sdk.metrics(target)


def test_a_tokenizer_of_python_code_is_refused():
    class Slow(PreTrainedTokenizerBase):
        backend_tokenizer = None

        def __init__(self):
            """Nothing of it is used but this."""

        def get_vocab(self):
            return {"a": 0, "b": 1}

    tokenizers = dict(tokenizer=small_tokenizer("bytes"), draft_tokenizer=Slow())
    with pytest.raises(ValueError, match=r"draft_tokenizer: expected a fast tokenizer .* got Slow"):
        sdk.patch(model_of("bytes"), model=model_of("pieces"), **tokenizers)


def test_other_methods_take_no_tokenizer():
    for name in ("tokenizer", "draft_tokenizer", "draft_translation"):
        with pytest.raises(ValueError, match=f"{name}: expected none with method 'ngram'"):
            sdk.patch(model_of("bytes"), **{name: "text"})


@pytest.mark.parametrize("way", WAYS)
def test_merged_with_a_lookup(way):
    """Other drafters' tokens are kept too: the draft model reads them as any text."""
    target = model_of("bytes")
    draft = renamed(target, "bytes", "shuffled")
    inputs = batch(prompts("bytes", TEXTS[0][:60] * 2, NASTY[1] * 2))
    expected = new_tokens(target, inputs)
    for method in ("ngram+draft_model", "ngram,draft_model"):
        options = dict(method=method, draft_translation=way, num_speculative_tokens=6)
        tokenizers = tokenizers_of("bytes", "shuffled")
        with accelerated(target, model=draft, **options, **tokenizers) as metrics:
            assert new_tokens(target, inputs) == expected
        assert metrics.num_accepted_tokens > 0
