"""Other engines' options: errors, the ways to write a command line, SpeculativeConfig itself."""

import argparse
import json
import pathlib
import re
import types
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import SpeculativeConfig, config
from specdec_kernels.spellings import llama_cpp, sglang, vllm

ROOT = pathlib.Path(__file__).parent.parent
from_vllm = SpeculativeConfig.from_vllm
from_sglang = SpeculativeConfig.from_sglang
from_llama_cpp = SpeculativeConfig.from_llama_cpp
make = SpeculativeConfig.make
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
SGLANG = {"speculative_algorithm": "NGRAM"}


@pytest.fixture(autouse=True)
def today():
    """The methods that every version has: what the others need is missing."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(config, "METHODS", ("ngram", "none"))
        warnings.simplefilter("error")
        yield


ERRORS = [
    # vLLM: text, keys, methods, values.
    (from_vllm, "{", ValueError, "from_vllm: expected JSON text such as .*got '{': "),
    (from_vllm, "config.json", ValueError, "expected JSON text"),
    (from_vllm, "", ValueError, "expected JSON text"),
    (from_vllm, "[1]", ValueError, r"expected a JSON object, got '\[1\]'"),
    (from_vllm, 7, TypeError, "expected JSON text or a dictionary, got int"),
    (from_vllm, {**NGRAM, "prompt_lokup_max": 3}, ValueError, "nearest.*'prompt_lookup_max'"),
    (from_vllm, {**NGRAM, "draft_tp": 3}, ValueError, "from_vllm: unknown option 'draft_tp'"),
    (from_vllm, {**NGRAM, "method": "ngarm"}, ValueError, "method: expected.*got 'ngarm'"),
    (from_vllm, {**NGRAM, "method": 3}, ValueError, "method: expected one of ngram"),
    (from_vllm, {"method": "suffix"}, ValueError, "has no method 'suffix'; it has ngram, none"),
    (from_vllm, {"model": "a/eagle3-b"}, ValueError, "this version has no method 'eagle3'"),
    (from_vllm, {"model": "my_module.Proposer"}, ValueError, "no method 'custom_class'"),
    (from_vllm, {"model": "tiny", "num_speculative_tokens": 2}, ValueError, "'draft_model'"),
    (from_vllm, {"num_speculative_tokens": 5}, ValueError, "a method or a model, got neither"),
    (from_vllm, {"method": "ngram"}, ValueError, "num_speculative_tokens.*'ngram', got none"),
    (from_vllm, {**NGRAM, "num_speculative_tokens": "5"}, TypeError, "expected an integer"),
    (from_vllm, {**NGRAM, "num_speculative_tokens": 0}, ValueError, "expected at least 1, got 0"),
    (from_vllm, {**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, ValueError, "at most"),
    (from_vllm, {**NGRAM, "rejection_sample_method": "fly"}, ValueError, "refused: it is lossy"),
    (from_vllm, {**NGRAM, "rejection_sample_method": "synthetic"}, ValueError, "not be the mod"),
    (from_vllm, {**NGRAM, "rejection_sample_method": "blok"}, ValueError, "standard, block, got"),
    (from_vllm, {**NGRAM, "rejection_sample_method": [1]}, ValueError, r"standard, block, got \[1"),
    (from_vllm, {**NGRAM, "rejection_sample_method": "block", "rule": "token"}, ValueError,
     "rejection_sample_method sets rule to 'block', but it is 'token'"),
    *[(from_vllm, {**NGRAM, "num_speculative_tokens_per_batch_size": table}, ValueError,
       r"expected \[\[first size, last size, tokens\], ...\]")
      for table in (7, [3], [[1, 2]], [[1, 2, "x"]], [], [[1, 8, 0]])],
    *[(from_vllm, {**NGRAM, "num_speculative_tokens_per_batch_size": table}, ValueError,
       "expected rising ranges of sizes from 1 on")
      for table in ([[1, 4, 7], [4, 9, 2]], [[5, 3, 2]], [[0, 3, 2]], [[1, 3, 2], [4, 9, -1]])],
    (make, {**NGRAM, "tensor_parallel_size": 2}, ValueError, "spells it draft_tensor_parallel_si"),
    (make, {"model": "tiny"}, ValueError, "patch: this version has no method 'draft_model'"),
    (make, {"method": "medusa"}, ValueError, "patch: this version has no method 'medusa'"),
    # SGLang
    (from_sglang, 7, TypeError, "expected words, a command line, or server arguments.*got int"),
    (from_sglang, ["--speculative-algorithm", 7], TypeError, "its words, got int 7"),
    (from_sglang, "--speculative-algorithm 'NGRAM", ValueError, "expected a command line.*quotat"),
    (from_sglang, "--speculative-algorithm NGARM", ValueError, "unknown algorithm 'NGARM'.*NGRAM"),
    (from_sglang, "--speculative-algorithm", ValueError, "algorithm: expected a value, got none"),
    (from_sglang, "--speculative-algorithm --tp 2", ValueError, "expected a value, got none"),
    (from_sglang, "--speculative-nmu-steps 3", ValueError, "nearest.*'--speculative-num-steps'"),
    (from_sglang, "--speculative-draft x", ValueError, "unknown option '--speculative-draft'"),
    (from_sglang, "--speculative-adaptive=1", ValueError, "adaptive: expected no value, got '1'"),
    (from_sglang, "--speculative-num-steps 3", ValueError, "expected --speculative-algorithm with"),
    (from_sglang, "--speculative-algorithm NGRAM --speculative-num-draft-tokens x", ValueError,
     "--speculative-num-draft-tokens: expected an integer, got 'x'"),
    (from_sglang, {**SGLANG, "speculative_num_draft_tokens": 3.5}, TypeError, "integer, got 3.5"),
    (from_sglang, {**SGLANG, "speculative_num_draft_tokens": True}, TypeError, "an integer, got T"),
    (from_sglang, {**SGLANG, "speculative_num_draft_tokens": 1}, ValueError, "at least 2, got 1"),
    (from_sglang, {**SGLANG, "speculative_adaptive": "yes"}, TypeError, "True or False, got 'yes'"),
    (from_sglang, {"speculative_algorithm": 3}, TypeError, "algorithm: expected text, got 3"),
    (from_sglang, {**SGLANG, "speculative_nmu_steps": 3}, ValueError, "'speculative_num_steps'"),
    (from_sglang, {**SGLANG, "speculative_accept_threshold_acc": "high"}, ValueError, "a number"),
    (from_sglang, {**SGLANG, "speculative_accept_threshold_acc": [1]}, TypeError, "a number"),
    (from_sglang, {**SGLANG, "speculative_use_rejection_sampling": True}, ValueError,
     "expected one of EAGLE, EAGLE3, NEXTN, got NGRAM"),
    (from_sglang, {**SGLANG, "speculative_use_block_verification": True}, ValueError, "got NGRAM"),
    (from_sglang, "--speculative-algorithm EAGLE --speculative-eagle-topk 4 "
     "--speculative-use-rejection-sampling", ValueError, "expected --speculative-eagle-topk 1"),
    (from_sglang, "--speculative-algorithm EAGLE --speculative-num-steps 4", ValueError,
     "together, or none of them"),
    (from_sglang, "--speculative-algorithm EAGLE --speculative-eagle-topk 4 "
     "--speculative-num-steps 4", ValueError, "together, or none of them"),
    (from_sglang, "--speculative-algorithm EAGLE --speculative-eagle-topk 1 "
     "--speculative-num-steps 0", ValueError, "num-steps: expected at least 1, got 0"),
    (from_sglang, "--speculative-algorithm STANDALONE", ValueError, "draft-model-path with STANDA"),
    (from_sglang, "--speculative-algorithm UNO", ValueError, "this version has no method 'uno'"),
    (from_sglang, "--speculative-algorithm DFLASH --speculative-draft-model x "
     "--speculative-dflash-block-size 8 --speculative-num-draft-tokens 9", ValueError, "disagree"),
    # llama.cpp
    (from_llama_cpp, "--spec-type ngram-mood", ValueError, "type 'ngram-mood'.*'ngram-mod'"),
    (from_llama_cpp, "--spec-type ngram-mod,ngram-simple", ValueError, "one method here"),
    (from_llama_cpp, "--spec-default --spec-type draft-dspark -md x", ValueError, "no method"),
    (from_llama_cpp, "--spec-draft-nmax 3", ValueError, "nearest.*'--spec-draft-n-max'"),
    (from_llama_cpp, "--draft-mux 3", ValueError, "unknown option '--draft-mux'"),
    (from_llama_cpp, "--model-drat x --poll-drft 1 --top-k-draft 3", ValueError, "--top-k-draft"),
    (from_llama_cpp, "--draft-max 16", ValueError, "use --spec-draft-n-max or --spec-ngram-mod-n"),
    (from_llama_cpp, "--draft-n-min 1", ValueError, "use --spec-draft-n-min or --spec-ngram-mod-n"),
    (from_llama_cpp, "-md tiny", ValueError, "expected --spec-type with a draft model, got none"),
    (from_llama_cpp, "--spec-type draft-simple", ValueError, "expected --spec-draft-model with"),
    (from_llama_cpp, "--spec-type draft-dspark -md x", ValueError, "no method 'dspark'"),
    (from_llama_cpp, "--spec-type ngram-mod --spec-ngram-mod-n-max 1.5", ValueError, "an integer"),
    (from_llama_cpp, "--spec-type", ValueError, "--spec-type: expected a value, got none"),
    (from_llama_cpp, None, TypeError, "its words, got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize("read, given, error, message", ERRORS, ids=str)
def test_errors(read, given, error, message):
    with pytest.raises(error, match=message):
        read(given)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["ngram", "1", "x"]),
    lambda values: st.lists(values, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("read, module", [(from_vllm, vllm), (make, vllm), (from_sglang, sglang)])
@given(data=st.data())
def test_fuzz_any_value_gives_a_config_or_a_clear_error(read, module, data):
    some = data.draw(st.dictionaries(st.sampled_from(sorted(module.KEYS)), VALUES, max_size=4))
    some = {"method": "ngram", "--speculative-algorithm": "NGRAM"} | some
    del some["method" if module is sglang else "--speculative-algorithm"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert isinstance(read(some), SpeculativeConfig)
        except (TypeError, ValueError) as error:
            assert re.match(r"[\w-]+: ", str(error)), error


def test_ways_to_write_sglang_options():
    """One set of options as words, a shell string, abbreviated, a dictionary and an object."""
    words = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    settings = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    ways = [
        words,
        tuple(words),
        ["--speculative-algorithm=NGRAM", "--speculative_num_draft_tokens=8"],
        ["python", "-m", "sglang.launch_server", "--tp", "2", *words, "--special-mode"],
        "python -m sglang.launch_server --model 'a b' \\\n  --speculative-algo NGRAM \\\n"
        "  --speculative-num-d 8",
        settings,
        {k.replace("_", "-"): v for k, v in settings.items()} | {"tp_size": 2},
        argparse.Namespace(**settings, speculative_num_steps=None, tp_size=2),
        types.SimpleNamespace(**settings, speculative_defaults=lambda: 0),
    ]
    expected = make(
        num_speculative_tokens=7,
        prompt_lookup_min=1,
        prompt_lookup_max=17,
        prompt_lookup_matches=10,
    )
    assert [from_sglang(way) for way in ways] == [expected] * len(ways)


def test_ways_to_write_llama_cpp_options():
    words = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "9"]
    ways = [
        words,
        ["llama-server", "-m", "x.gguf", "--special", "-sp", *words],
        ["--spec-type=ngram-simple", "--spec_ngram_simple_size_m=9"],
        "llama-server -m x.gguf \\\n --spec-type none,ngram-simple --spec-ngram-simple-size-m 9",
        [*words[2:], "5", *words, "--spec-type", "ngram-simple"],
    ]
    expected = make(
        num_speculative_tokens=9,
        prompt_lookup_min=12,
        prompt_lookup_max=12,
        prompt_lookup_matches=1,
    )
    assert [from_llama_cpp(way) for way in ways] == [expected] * len(ways)


def test_patch_takes_vllm_json_as_it_is():
    """The same keys, our defaults; keywords win, whichever spelling either has."""
    given = {**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": None, "model": "ngram"}
    expected = make(num_speculative_tokens=5, prompt_lookup_max=4)
    assert make(given) == make(json.loads(json.dumps(given))) == expected
    assert (expected.prompt_lookup_min, from_vllm(json.dumps(given)).prompt_lookup_min) == (1, 4)
    block = {"rejection_sample_method": "block"}
    assert make(block).rule == make(None, **block).rule == "block"
    assert make(block, rule="token").rule == "token"
    assert make({"rule": "token"}, rejection_sample_method="standard").rule == "auto"
    assert make({"num_speculative_tokens": 5}, num_speculative_tokens=None) == make()
    with pytest.warns(UserWarning, match="patch: no effect here: moe_backend='x'.*; enforce_ea"):
        assert make({"moe_backend": "x"}, enforce_eager=True) == make()


def test_an_option_arrives_with_its_field(monkeypatch):
    """A version that has a method and its fields reads it without a change here."""
    monkeypatch.setattr(config, "METHODS", ("ngram", "draft_model", "none"))
    fields = ("method", "num_speculative_tokens", "model", "draft_sample_method", "draft_p_min")
    monkeypatch.setattr(SpeculativeConfig, "_fields", classmethod(lambda cls: fields))
    monkeypatch.setattr(
        SpeculativeConfig, "__init__", lambda self, **given: vars(self).update(given)
    )
    found = from_llama_cpp("--spec-type draft-simple -md tiny --spec-draft-p-min 0.5")
    assert vars(found) == {
        "method": "draft_model",
        "model": "tiny",
        "num_speculative_tokens": 3,
        "draft_p_min": 0.5,
        "draft_sample_method": "greedy",
    }
    with pytest.raises(ValueError, match="this version has no option 'draft_min_tokens'"):
        from_llama_cpp("--spec-type draft-simple -md tiny --spec-draft-n-min 2")


@pytest.mark.parametrize("module", [vllm, sglang, llama_cpp], ids=lambda m: m.__name__)
def test_the_page_names_every_option(module):
    page = (ROOT / "docs" / "engines.md").read_text()
    named = set(re.findall(r"`(-*[\w-]+)`", page))
    for name in module.KEYS:
        short = re.sub("^--(speculative|spec)-", "", name)
        assert name in named or short in named, name
    for name in (*sglang.METHODS, *llama_cpp.TYPES):
        assert name in named, name
