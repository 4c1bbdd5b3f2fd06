"""Suffix decoding through generate: the same text, its options, the cache between calls."""

import threading
import warnings

import pytest
import torch
from test_sampling import FALSE_ALARM, SMALL, WARPED, draw, joints, pvalues
from tiny import FAMILIES, accelerated, batch, fresh, has_family, lookup_rows, new_tokens, tiny

import specdec_kernels as sdk
from specdec_kernels import native
from specdec_kernels.drafting.factory import make_drafter
from specdec_kernels.drafting.suffix import SuffixDrafter

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))


@pytest.fixture(scope="module")
def model():
    return fresh("llama")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("size", [None, 6])
def test_greedy_text_is_that_of_plain(model, rows, tree, size):
    """One row and three, again with what the first calls generated, which shortens the second."""
    options = dict(method="suffix", suffix_decoding_tree=tree, num_speculative_tokens=size)
    for inputs in (batch(rows[:1]), batch(rows)):
        expected = new_tokens(model, inputs)
        steps = []
        with accelerated(model, **options) as metrics:
            for _ in range(3):
                before = metrics.num_steps
                assert new_tokens(model, inputs) == expected
                steps.append(metrics.num_steps - before)
            assert metrics.num_accepted_tokens > 0
            assert len(sdk.suffix_cache(model)) == 3 * len(expected)
        if size:
            assert steps[2] <= steps[1] < steps[0]


@pytest.mark.parametrize("name", [n for n in ("gpt2", "gemma3_text", "qwen3_moe") if n in FAMILIES])
def test_greedy_text_of_other_families(name):
    if not has_family(name):
        pytest.skip(f"this transformers has no {name}")
    model = tiny(name)
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)
    with accelerated(model, method="suffix", num_speculative_tokens=8) as metrics:
        for _ in range(2):
            assert new_tokens(model, inputs) == expected
        assert metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_length_is_exact(model, rows, count):
    """C02, and the position limit: no draft reaches beyond what may be emitted."""
    inputs = batch(rows)
    expected = new_tokens(model, inputs, max_new_tokens=count)
    with accelerated(model, method="suffix", num_speculative_tokens=6):
        for _ in range(2):
            assert new_tokens(model, inputs, max_new_tokens=count) == expected
        assert sdk.suffix_cache(model).num_tokens == 2 * 3 * count


def test_eos_inside_a_draft(model, rows):
    """C03: the text ends where plain's does, in the cache too, and drafts end at an EOS."""
    inputs = batch(rows)
    text = new_tokens(model, inputs)
    eos = text[0][20]
    options = dict(eos_token_id=eos, pad_token_id=0)
    expected = new_tokens(model, inputs, **options)
    with accelerated(model, method="suffix", num_speculative_tokens=8):
        for _ in range(2):
            assert new_tokens(model, inputs, **options) == expected
        tokens, lengths = sdk.suffix_cache(model).native.texts()
    emitted = [row[: row.index(eos) + 1] if eos in row else row for row in expected]
    stored = torch.frombuffer(bytearray(tokens), dtype=torch.int32).split(
        torch.frombuffer(bytearray(lengths), dtype=torch.int64).tolist()
    )
    assert [text.tolist() for text in stored] == emitted * 2


def test_the_cache_of_one_model_serves_all_threads(model, rows):
    """Overlapping calls share one cache; each text is that of plain."""
    single = [batch([row]) for row in rows]
    expected = [new_tokens(model, inputs) for inputs in single]
    found = {}

    def work(i):
        found[i] = [new_tokens(model, single[(i + k) % 3]) for k in range(6)]

    with accelerated(model, method="suffix", num_speculative_tokens=8):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sdk.suffix_cache(model)) == 18
    assert found == {i: [expected[(i + k) % 3] for k in range(6)] for i in range(3)}


def test_exact_joint():
    """A02: sampled text, drafted from thousands of earlier samples."""
    model = fresh("llama", **SMALL)
    torch.manual_seed(5)
    options = dict(num_speculative_tokens=9, suffix_decoding_max_spec_factor=3.0)
    with accelerated(model, method="suffix", **options) as metrics:
        counts = draw(model, 21_000, **WARPED)
    assert metrics.num_accepted_tokens > 2_000
    assert min(pvalues(counts, joints("warped"))) > FALSE_ALARM
    assert max(pvalues(counts, joints("plain"))) < FALSE_ALARM


def test_exact_joint_of_one_seed_used_again_and_again(model, rows):
    """A29: the same seeds give the same text however much the cache knows, tree or chain."""
    options = dict(do_sample=True, temperature=0.7, top_k=0)
    with accelerated(model, method="none", seed=3):
        expected = new_tokens(model, batch(rows), **options)
    for tree in (True, False):
        settings = dict(method="suffix", seed=3, suffix_decoding_tree=tree)
        with accelerated(model, num_speculative_tokens=8, **settings) as metrics:
            for _ in range(3):
                assert new_tokens(model, batch(rows), **options) == expected
            assert metrics.num_accepted_tokens > 40


def test_the_text_of_torchs_generator(model, rows):
    """rng="torch": what unpatched generate draws with the same seed."""
    inputs, options = batch(rows[:1]), dict(do_sample=True, temperature=0.7, top_k=0)
    torch.manual_seed(11)
    expected = new_tokens(model, inputs, **options)
    with accelerated(model, method="suffix", rng="torch", num_speculative_tokens=8) as metrics:
        for _ in range(2):
            torch.manual_seed(11)
            assert new_tokens(model, inputs, **options) == expected
        assert metrics.num_accepted_tokens > 20


@pytest.mark.parametrize("rule", ["token", "recursive", "block", "typical"])
def test_rules_that_a_cache_would_bias_are_refused(model, rows, rule):
    with pytest.raises(ValueError, match=f"rule: expected auto or coupled .* got '{rule}'"):
        sdk.patch(model, method="suffix", rule=rule)
    options = dict(method="suffix", suffix_decoding_max_cached_requests=0, rule=rule)
    expected = new_tokens(model, batch(rows))
    with accelerated(model, num_speculative_tokens=8, **options) as metrics:
        assert new_tokens(model, batch(rows)) == expected
        assert metrics.num_accepted_tokens > 0
        with pytest.raises(ValueError, match="suffix_cache: expected a model patched with method"):
            sdk.suffix_cache(model)


def test_exact_joint_under_block_without_a_cache():
    model = fresh("llama", **SMALL)
    torch.manual_seed(6)
    options = dict(method="suffix", suffix_decoding_max_cached_requests=0, rule="block")
    with accelerated(model, num_speculative_tokens=4, **options) as metrics:
        counts = draw(model, 8_400, **WARPED)
    assert metrics.num_accepted_tokens > 300
    assert min(pvalues(counts, joints("warped"))) > FALSE_ALARM


def test_a_call_that_fails_leaves_the_cache_usable(model, rows):
    """C10: what was generated until then stays, and ends there."""

    class Stop(Exception):
        pass

    class Fails:
        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls > 9:
                raise Stop

        def end(self):
            pass

    inputs = batch(rows[:1])
    expected = new_tokens(model, inputs)
    with accelerated(model, method="suffix", num_speculative_tokens=4):
        with pytest.raises(Stop):
            model.generate(**inputs, do_sample=False, max_new_tokens=48, streamer=Fails())
        assert len(sdk.suffix_cache(model)) == 1
        for _ in range(2):
            assert new_tokens(model, inputs) == expected
        assert len(sdk.suffix_cache(model)) == 3


def test_limits_of_the_cache(model, rows):
    with accelerated(model, method="suffix", suffix_decoding_max_cached_requests=4):
        for _ in range(3):
            new_tokens(model, batch(rows), max_new_tokens=9)
            assert len(sdk.suffix_cache(model)) <= 4
    with accelerated(model, method="suffix", suffix_decoding_max_cached_tokens=50):
        for _ in range(3):
            new_tokens(model, batch(rows), max_new_tokens=20)
            assert sdk.suffix_cache(model).num_tokens <= 50
        sdk.suffix_cache(model).clear()
        assert len(sdk.suffix_cache(model)) == sdk.suffix_cache(model).num_tokens == 0


def test_a_saved_cache_serves_another_patch(model, rows, tmp_path):
    inputs = batch(rows)
    options = dict(method="suffix", num_speculative_tokens=8)
    expected = new_tokens(model, inputs)
    with accelerated(model, **options) as metrics:
        assert new_tokens(model, inputs) == expected
        cold = metrics.num_steps
        sdk.suffix_cache(model).save(tmp_path / "outputs")
    with accelerated(model, **options) as metrics:
        sdk.suffix_cache(model).load(tmp_path / "outputs")
        assert new_tokens(model, inputs) == expected
        assert metrics.num_steps < cold


def test_settings(model, monkeypatch):
    """vLLM's keys, as they are; what is out of range is refused."""
    vllm = {
        "method": "suffix",
        "num_speculative_tokens": 16,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    sdk.patch(model, vllm)
    assert len(sdk.suffix_cache(model)) == 0
    for name, value, error in (
        ("suffix_decoding_max_tree_depth", 1, "expected at least 2, got 1"),
        ("suffix_decoding_max_tree_depth", 1025, "expected at most 1024, got 1025"),
        ("suffix_decoding_max_cached_requests", -1, "expected at least 0, got -1"),
        ("suffix_decoding_max_cached_tokens", 0, "expected at least 1, got 0"),
        ("suffix_decoding_max_spec_factor", -0.5, "expected a number of at least 0, got -0.5"),
        ("suffix_decoding_min_token_prob", 1.5, "expected a number from 0 to 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {error}"):
            sdk.patch(model, vllm, **{name: value})
    for name in ("suffix_decoding_max_spec_factor", "suffix_decoding_tree"):
        with pytest.raises(TypeError, match=f"{name}: expected"):
            sdk.patch(model, vllm, **{name: "much"})
    with pytest.raises(ValueError, match="suffix_cache: expected a patched model"):
        sdk.suffix_cache(tiny("llama"))
    monkeypatch.setattr(native, "cpu", None)
    monkeypatch.setattr(native, "cpu_error", "not built")
    with pytest.raises(ImportError, match="method 'suffix' needs the compiled CPU kernels"):
        sdk.patch(model, method="suffix")


def test_when_drafts_are_chains():
    settings = (
        (dict(), True),
        (dict(linear="invariant"), False),
        (dict(linear="invariant", suffix_decoding_tree=True), True),
        (dict(suffix_decoding_tree=False), False),
        (dict(rule="block", suffix_decoding_max_cached_requests=0), False),
    )
    for options, tree in settings:
        config = sdk.SpeculativeConfig(method="suffix", **options)
        drafter = make_drafter(config, frozenset())
        assert isinstance(drafter, SuffixDrafter) and drafter.cache is None
        assert config.suffix_trees is tree


def test_invariant_chains_keep_the_text(model, rows):
    """linear="invariant" promises the bits of undrafted decoding, in 16 bits."""
    model = fresh("llama").bfloat16()
    with accelerated(model, method="none", linear="invariant"):
        expected = new_tokens(model, batch(rows))
    options = dict(method="suffix", linear="invariant", num_speculative_tokens=8)
    with accelerated(model, **options) as metrics:
        for _ in range(2):
            assert new_tokens(model, batch(rows)) == expected
        assert metrics.num_accepted_tokens > 0


def test_patching_twice_says_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdk.patch(model, method="suffix")
        sdk.patch(model, method="suffix")
