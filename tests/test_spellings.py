"""Other engines' options: every key of their tables, mapped, harmless or refused.

They are read against FIELDS and METHODS, which have more than a version of SpeculativeConfig may.
"""

import warnings

import pytest

from specdec_kernels.spellings import llama_cpp, reading, sglang, vllm

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "none")
FIELDS = (
    *("method", "num_speculative_tokens", "max_speculative_tokens", "rule", "seed", "linear"),
    "num_speculative_tokens_per_batch_size",
    *("prompt_lookup_min", "prompt_lookup_max", "prompt_lookup_matches"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("suffix_decoding_tree", "model", "draft_sample_method", "draft_tree_topk"),
    "draft_translation",
    *("draft_min_tokens", "draft_p_min"),
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
DRAFT = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 5}


def from_vllm(given):
    return vllm.read(given, FIELDS).resolve(FIELDS, METHODS)


def from_patch(given, **options):
    return vllm.read_plain(given, options, FIELDS).resolve(FIELDS, METHODS)


def from_sglang(given):
    return sglang.read(given).resolve(FIELDS, METHODS)


def from_llama_cpp(given):
    return llama_cpp.read(given).resolve(FIELDS, METHODS)


def quietly(read, given):
    """What `read` gives, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read(given)


def loudly(read, given):
    """What `read` gives, and its one warning."""
    with pytest.warns(UserWarning) as caught:
        found = read(given)
    assert len(caught) == 1 and caught[0].filename == __file__
    return found, str(caught[0].message)


def contains(settings, expected):
    return {name: settings.get(name, "absent") for name in expected} == expected


def ngram_flags(name, default):
    """An option of llama.cpp under the type it belongs to."""
    kinds = [k for k in ("ngram-simple", "ngram-map-k4v", "ngram-map-k", "ngram-mod") if k in name]
    return ["--spec-type", (kinds or [default])[0]]


# One engine after the other: how to read, its keys, a plain beginning, one more option.
ENGINES = {
    "vllm": (from_vllm, vllm.KEYS, lambda name: NGRAM, lambda start, k, v: {**start, k: v}),
    "patch": (from_patch, vllm.KEYS, lambda name: NGRAM, lambda start, k, v: {**start, k: v}),
    "sglang": (
        from_sglang,
        sglang.KEYS,
        lambda name: {"speculative_algorithm": "NGRAM"},
        lambda start, k, v: {**start, k: v},
    ),
    "llama.cpp": (
        from_llama_cpp,
        llama_cpp.KEYS,
        lambda name: ngram_flags(name, "ngram-simple"),
        lambda start, k, v: [*start, k] if isinstance(v, bool) else [*start, k, str(v)],
    ),
}
OTHER = {reading.whole: 7, reading.number: 0.25, reading.text: "x", reading.as_given: "x"}


def every(kind):
    return [
        pytest.param(engine, name, id=f"{engine} {name}")
        for engine, (_, keys, _, _) in ENGINES.items()
        for name, key in keys.items()
        if key.kind == kind
    ]


def other(name, key):
    """A value that is not the default; switches are named by the spelling that changes them."""
    if key.parse is reading.switch:
        negative = [spelled for spelled in key.names if spelled.startswith("--no-")]
        return (negative[0], False) if key.default and negative else (name, True)
    return name, OTHER[key.parse]


@pytest.mark.parametrize("engine, name", every("harmless"))
def test_harmless_options_warn_unless_they_have_the_default(engine, name):
    read, keys, start, more = ENGINES[engine]
    key, plain = keys[name], quietly(read, start(name))
    if key.default is not None and key.parse is not reading.switch:
        assert quietly(read, more(start(name), name, key.default)) == plain
    spelled, value = other(name, key)
    found, message = loudly(read, more(start(name), spelled, value))
    assert found == plain
    assert "no effect here" in message and f"{name}={value!r}" in message and key.what in message


@pytest.mark.parametrize("engine, name", every("refused"))
def test_refused_options_say_why(engine, name):
    read, keys, start, more = ENGINES[engine]
    key = keys[name]
    if key.default is not None:
        assert quietly(read, more(start(name), name, key.default)) == read(start(name))
    for spelled in (name, *key.names):
        with pytest.raises(ValueError) as caught:
            read(more(start(name), spelled, other(name, key)[1]))
        assert name in str(caught.value) and key.what in str(caught.value)


def flags(**given):
    """SGLang's options as a dictionary; `algorithm` first."""
    return {f"speculative_{name}": value for name, value in given.items()}


SUFFIX = {"method": "suffix"}
MAPPED = [
    # vLLM: with its defaults, 5 and 5, one mirrored by the other; chains.
    (from_vllm, NGRAM, {**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 5}),
    (from_vllm, {**NGRAM, "prompt_lookup_max": 4}, {"prompt_lookup_min": 4, "rule": "absent"}),
    (from_vllm, {**NGRAM, "prompt_lookup_min": 2}, {"prompt_lookup_max": 2}),
    (from_vllm, {**NGRAM, "prompt_lookup_min": None}, {"prompt_lookup_max": 5}),
    (from_vllm, NGRAM, {"prompt_lookup_matches": 1}),
    (from_vllm, {**NGRAM, "prompt_lookup_matches": 2}, {"prompt_lookup_matches": 2}),
    (from_vllm, {**NGRAM, "method": "ngram_gpu"}, {"method": "ngram"}),
    (from_vllm, {**NGRAM, "rejection_sample_method": "standard"}, {"rule": "auto"}),
    (from_vllm, {**NGRAM, "rejection_sample_method": "block"}, {"rule": "block"}),
    (from_vllm, {**NGRAM, "linear": "invariant", "seed": 3}, {"linear": "invariant", "seed": 3}),
    (from_vllm, {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 9, 0]]},
     {"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 9, 0]]}),
    (from_vllm, {"model": "[ngram]", "num_speculative_tokens": 5}, {**NGRAM, "model": "absent"}),
    (from_vllm, DRAFT, {**DRAFT, "draft_sample_method": "greedy", "draft_tree_topk": 1}),
    (from_vllm, {**DRAFT, "method": None}, DRAFT),
    (from_vllm, {**DRAFT, "use_heterogeneous_vocab": True}, {"draft_translation": "intersection"}),
    (from_vllm, {**DRAFT, "draft_sample_method": "probabilistic"},
     {"draft_sample_method": "probabilistic"}),
    (from_vllm, {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "num_speculative_tokens": 2},
     {"method": "eagle"}),
    (from_vllm, {"model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 2},
     {"method": "eagle3", "num_speculative_tokens": 2}),
    (from_vllm, {"model": "z-lab/Qwen3-8B-DFlash-b16"}, {"method": "dflash"}),
    (from_vllm, {"model": "deepseek-ai/dspark_qwen3_8b_block7"}, {"method": "dspark"}),
    (from_vllm, {"method": "deepseek_mtp"}, {"method": "mtp", "num_speculative_tokens": "absent"}),
    (from_vllm, {"method": "qwen3_next_mtp", "num_speculative_tokens": 3}, {"method": "mtp"}),
    (from_vllm, SUFFIX, {"num_speculative_tokens": 24, "suffix_decoding_tree": False,
                         "suffix_decoding_max_cached_requests": 10000,
                         "suffix_decoding_max_spec_factor": 1.0,
                         "suffix_decoding_min_token_prob": 0.1}),
    (from_vllm, {**SUFFIX, "suffix_decoding_max_tree_depth": 9},
     {"num_speculative_tokens": 9, "suffix_decoding_max_tree_depth": 9}),
    (from_vllm, {**SUFFIX, "suffix_decoding_max_cached_requests": 0},
     {"suffix_decoding_max_cached_requests": 0}),
    (from_vllm, {**SUFFIX, "suffix_decoding_max_spec_factor": 2.0},
     {"suffix_decoding_max_spec_factor": 2.0}),
    (from_vllm, {**SUFFIX, "suffix_decoding_min_token_prob": 0.2},
     {"suffix_decoding_min_token_prob": 0.2}),
    # patch: the same keys, without vLLM's defaults.
    (from_patch, {}, {"method": "absent", "prompt_lookup_min": "absent"}),
    (from_patch, NGRAM, {**NGRAM, "prompt_lookup_min": "absent", "rule": "absent"}),
    (from_patch, {**DRAFT, "method": None}, DRAFT),
    (from_patch, {**NGRAM, "prompt_lookup_max": None}, {"prompt_lookup_max": "absent"}),
    (from_patch, {**NGRAM, "rejection_sample_method": "block"}, {"rule": "block"}),
    # SGLang: its numbers of tokens count the root.
    (from_sglang, {}, {"method": "none"}),
    (from_sglang, flags(algorithm=None, num_steps=None, ngram_capacity=10_000_000),
     {"method": "none"}),
    (from_sglang, flags(algorithm="NGRAM"),
     {"method": "ngram", "num_speculative_tokens": 11, "prompt_lookup_min": 1,
      "prompt_lookup_max": 17, "prompt_lookup_matches": 10}),
    (from_sglang, flags(algorithm="ngram", num_draft_tokens=8, ngram_max_bfs_breadth=1,
                        ngram_max_trie_depth=5),
     {"num_speculative_tokens": 7, "prompt_lookup_matches": 1, "prompt_lookup_max": 4}),
    (from_sglang, flags(algorithm="STANDALONE", draft_model_path="tiny"),
     {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3, "draft_tree_topk": 1,
      "draft_sample_method": "greedy"}),
    (from_sglang, flags(algorithm="STANDALONE", draft_model="tiny", num_steps=5, eagle_topk=1),
     {"num_speculative_tokens": 5}),
    (from_sglang, flags(algorithm="EAGLE3", draft_model_path="head"),
     {"method": "eagle3", "model": "head", "num_speculative_tokens": "absent"}),
    (from_sglang, flags(algorithm="EAGLE", draft_model_path="head", num_steps=3, eagle_topk=1,
                        num_draft_tokens=4, use_rejection_sampling=True),
     {"method": "eagle", "draft_sample_method": "probabilistic", "rule": "absent"}),
    (from_sglang, flags(algorithm="EAGLE", use_block_verification=True),
     {"method": "mtp", "draft_sample_method": "probabilistic", "rule": "block"}),
    (from_sglang, flags(algorithm="NEXTN", adaptive=True),
     {"method": "mtp", "max_speculative_tokens": 7, "num_speculative_tokens": "absent"}),
    (from_sglang, flags(algorithm="FROZEN_KV_MTP", draft_model_path="a"), {"method": "mtp"}),
    (from_sglang, flags(algorithm="DFLASH", draft_model_path="b", dflash_block_size=16),
     {"method": "dflash", "num_speculative_tokens": 15, "draft_tree_topk": 1}),
    (from_sglang, flags(algorithm="DSPARK", dspark_block_size=7, num_draft_tokens=8),
     {"method": "dspark", "num_speculative_tokens": 7}),
    # llama.cpp
    (from_llama_cpp, "llama-server -m x.gguf --port 80", {"method": "none"}),
    (from_llama_cpp, "--spec-type none", {"method": "none"}),
    (from_llama_cpp, "--spec-type draft-simple -md tiny",
     {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3, "draft_min_tokens": 0,
      "draft_p_min": 0.0, "draft_tree_topk": 1}),
    (from_llama_cpp, "--spec-type draft-simple --model-draft tiny --spec-draft-n-max 16 "
     "--spec-draft-n-min 2 --draft-p-min 0.5",
     {"num_speculative_tokens": 16, "draft_min_tokens": 2, "draft_p_min": 0.5}),
    (from_llama_cpp, "--spec-type draft-simple -hfd me/tiny:Q4_0 -md file", {"model": "me/tiny"}),
    (from_llama_cpp, "--spec-type draft-mtp --spec-draft-n-max 0", {"method": "none"}),
    (from_llama_cpp, "--spec-type draft-mtp", {"method": "mtp", "num_speculative_tokens": 3}),
    (from_llama_cpp, "--spec-type draft-simple,ngram-simple -md tiny --spec-draft-n-max 7",
     {"method": "ngram,draft_model", "model": "tiny", "max_speculative_tokens": 48,
      "prompt_lookup_min": 12, "prompt_lookup_max": 12, "prompt_lookup_matches": 1}),
    (from_llama_cpp, "--spec-type draft-simple,ngram-mod -md tiny --spec-draft-n-max 0",
     {"method": "ngram", "max_speculative_tokens": 64}),
    (from_llama_cpp, "--spec-type draft-eagle3 -md head", {"method": "eagle3"}),
    (from_llama_cpp, "--spec-type draft-dflash -md head", {"method": "dflash"}),
    (from_llama_cpp, "--spec-type draft-dspark -md head", {"method": "dspark"}),
    (from_llama_cpp, "--spec-default",
     {"method": "ngram", "prompt_lookup_min": 24, "prompt_lookup_max": 24,
      "num_speculative_tokens": 64, "prompt_lookup_matches": 1}),
    (from_llama_cpp, "--spec-ngram-mod-n-max 9 --spec-default --spec-ngram-mod-n-match 8",
     {"num_speculative_tokens": 64, "prompt_lookup_min": 8}),
    (from_llama_cpp, "--spec-type ngram-mod --spec-ngram-mod-n-max 9",
     {"num_speculative_tokens": 9}),
    *[(from_llama_cpp, f"--spec-type {kind} --spec-{kind}-size-n 6 --spec-{kind}-size-m 7",
       {"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 6,
        "num_speculative_tokens": 7}) for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")],
    (from_llama_cpp, "--spec-type ngram-cache",
     {"prompt_lookup_min": 1, "prompt_lookup_max": 4, "num_speculative_tokens": 8}),
]  # fmt: skip


@pytest.mark.parametrize("read, given, expected", MAPPED, ids=lambda x: getattr(x, "__name__", x))
def test_mapped_options(read, given, expected):
    assert contains(quietly(read, given), expected)


@pytest.mark.parametrize("read, module", [(from_vllm, vllm), (from_sglang, sglang),
                                          (from_llama_cpp, llama_cpp)])  # fmt: skip
def test_every_mapped_option_is_tried(read, module):
    tried = " ".join(str(given).replace("_", "-") for r, given, *_ in MAPPED + LOUD if r is read)
    for name, key in module.KEYS.items():
        if key.kind == "mapped":
            spelled = (name, *key.names) if module is not sglang else (name.lstrip("-"),)
            assert any(s.replace("_", "-") in tried for s in spelled), name


# What another engine does in another way, or overrides, is said.
LOUD = [
    (from_sglang, flags(algorithm="NGRAM", eagle_topk=4, num_steps=2),
     {"num_speculative_tokens": 11, "draft_tree_topk": "absent"}, "NGRAM does not use it"),
    (from_sglang, flags(algorithm="NGRAM", draft_model_path="x"), {"model": "absent"}, "path='x'"),
    (from_sglang, flags(algorithm="EAGLE", draft_model_path="h", num_steps=5, eagle_topk=4,
                        num_draft_tokens=8),
     {"num_speculative_tokens": 7, "draft_tree_topk": 4}, "num-steps=5"),
    (from_sglang, flags(algorithm="STANDALONE", draft_model_path="h", num_steps=3, eagle_topk=1,
                        num_draft_tokens=9),
     {"num_speculative_tokens": 3}, "num-draft-tokens=9"),
    (from_sglang, flags(algorithm="STANDALONE", draft_model_path="h", adaptive=True),
     {"num_speculative_tokens": 3}, "adaptive=True"),
    (from_llama_cpp, "--spec-type ngram-simple --spec-draft-n-max 9",
     {"num_speculative_tokens": 48}, "ngram-simple does not use it"),
]  # fmt: skip


@pytest.mark.parametrize("read, given, expected, words", LOUD)
def test_what_is_done_in_another_way_is_said(read, given, expected, words):
    found, message = loudly(read, given)
    assert contains(found, expected) and words in message
