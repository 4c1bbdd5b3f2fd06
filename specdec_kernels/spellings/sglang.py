"""SGLang's --speculative options, as of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec_kernels.spellings import argv
from specdec_kernels.spellings.reading import (
    Key,
    Reading,
    harmless,
    mapped,
    number,
    refused,
    switch,
    text,
    unknown,
    whole,
)

WHO = "from_sglang"
DRAFT_MODEL = "how the drafter is run cannot change what is generated"
TRIE = "here the text of each row is its own index"
CORPUS = "drafts come from no corpus here"
LOSSY = "other thresholds than 1 accept what the model would not have drawn"

ALGORITHM = "--speculative-algorithm"
MODEL = "--speculative-draft-model-path"
STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
TOKENS = "--speculative-num-draft-tokens"
REJECTION = "--speculative-use-rejection-sampling"
BLOCK = "--speculative-use-block-verification"
ADAPTIVE = "--speculative-adaptive"
BREADTH = "--speculative-ngram-max-bfs-breadth"
DEPTH = "--speculative-ngram-max-trie-depth"
DFLASH = "--speculative-dflash-block-size"
DSPARK = "--speculative-dspark-block-size"

KEYS: dict[str, Key] = {
    ALGORITHM: mapped("method", parse=text),
    MODEL: mapped("model", parse=text, names=("--speculative-draft-model",)),
    STEPS: mapped("num_speculative_tokens", parse=whole),
    TOPK: mapped("draft_tree_topk", parse=whole),
    TOKENS: mapped("num_speculative_tokens", parse=whole),
    REJECTION: mapped("draft_sample_method", False, switch),
    BLOCK: mapped("rule", False, switch),
    ADAPTIVE: mapped("max_speculative_tokens", False, switch),
    BREADTH: mapped("prompt_lookup_matches", 10, whole),
    DEPTH: mapped("prompt_lookup_max", 18, whole),
    DFLASH: mapped("num_speculative_tokens", parse=whole),
    DSPARK: mapped("num_speculative_tokens", parse=whole),
    "--speculative-accept-threshold-single": refused(LOSSY, 1.0, number),
    "--speculative-accept-threshold-acc": refused(LOSSY, 1.0, number),
    "--speculative-draft-model-revision": refused(
        "give the folder of that revision as model", "main", text
    ),
    "--speculative-ngram-external-corpus-path": refused(CORPUS, parse=text),
    "--speculative-ngram-external-sam-budget": refused(CORPUS, 0, whole),
    "--speculative-ngram-external-corpus-max-tokens": harmless(CORPUS, 10_000_000, whole),
    "--speculative-ngram-min-bfs-breadth": harmless(TRIE, 1, whole),
    "--speculative-ngram-match-type": harmless("the latest matches come first", "BFS", text),
    "--speculative-ngram-capacity": harmless(TRIE, 10_000_000, whole),
    "--speculative-adaptive-config": harmless("the number adapts to measured times", parse=text),
    "--speculative-token-map": harmless(DRAFT_MODEL, parse=text),
    "--speculative-attention-mode": harmless(DRAFT_MODEL, "prefill", text),
    "--speculative-draft-attention-backend": harmless(DRAFT_MODEL, parse=text),
    "--speculative-draft-load-format": harmless(DRAFT_MODEL, parse=text),
    "--speculative-draft-model-quantization": harmless(DRAFT_MODEL, parse=text),
    "--speculative-draft-kv-cache-dtype": harmless(DRAFT_MODEL, parse=text),
    "--speculative-draft-window-size": harmless(DRAFT_MODEL, parse=whole),
    "--speculative-draft-sink-size": harmless(DRAFT_MODEL, parse=whole),
    "--speculative-moe-runner-backend": harmless(DRAFT_MODEL, parse=text),
    "--speculative-moe-a2a-backend": harmless(DRAFT_MODEL, parse=text),
    "--speculative-dsa-topk-backend": harmless(DRAFT_MODEL, "sgl-kernel", text),
    "--speculative-enable-w4a4-mxfp4-megamoe": harmless(
        DRAFT_MODEL, parse=switch, names=("--no-speculative-enable-w4a4-mxfp4-megamoe",)
    ),
    "--speculative-boundary-reduction": harmless(DRAFT_MODEL, "rs+rsv", text),
    "--speculative-domino-candidate-pool-size": harmless(DRAFT_MODEL, 2048, whole),
    "--speculative-dspark-sps-table-path": harmless(DRAFT_MODEL, parse=text),
    "--speculative-dspark-confidence-sts-path": harmless(DRAFT_MODEL, parse=text),
    "--speculative-dspark-align-verify-tokens-to-graph-tier": harmless(DRAFT_MODEL, False, switch),
}

# NEXTN is EAGLE to SGLang: layers of the target's own checkpoint when no drafter is named.
METHODS = {
    "NGRAM": "ngram",
    "STANDALONE": "draft_model",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "FROZEN_KV_MTP": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "UNO": "uno",
}
EAGLES = ("EAGLE", "EAGLE3", "NEXTN")
NEEDS_MODEL = ("STANDALONE", "EAGLE3", "DFLASH")
NGRAM_TOKENS = 12
STANDALONE_SHAPE = (3, 1, 4)  # steps, top-k, tokens
MOST_ADAPTIVE_STEPS = 7


def read(args: str | Iterable[str] | Mapping[str, Any] | Any) -> Reading:
    """Words of a command line, a shell string, or server arguments as a dictionary or object.

    SGLang's numbers of draft tokens count the root, which is no draft here. Options that the
    algorithm does not use have no effect, there as here.

    Raises:
        ValueError: an unknown or refused option or algorithm, a missing value, or what SGLang
            refuses too.
        TypeError: a value of another type.
    """
    reading = Reading(WHO)
    values = reading.sort(KEYS, _given(args))
    named = values.pop(ALGORITHM, None)
    if named is None:
        if values:
            raise ValueError(f"{WHO}: expected {ALGORITHM} with {next(iter(values))}, got none")
        reading.settings["method"] = "none"
        return reading
    algorithm = named.upper()
    if algorithm not in METHODS:
        raise unknown(WHO, named, METHODS, "algorithm")
    _take_model(reading, algorithm, values)
    _take_rule(reading, algorithm, values)
    if algorithm == "NGRAM":
        _take_ngram(reading, values)
    elif algorithm in ("DFLASH", "DSPARK"):
        _take_block(reading, algorithm, values)
    elif algorithm != "UNO":
        _take_tree(reading, algorithm, values)
    for name, value in values.items():
        reading.has_no_effect(name, value, f"{algorithm} does not use it")
    return reading


def _given(args: Any) -> dict[str, Any]:
    """Names of KEYS and what was given for them; the other options of a server are skipped."""
    if isinstance(args, (str, list, tuple)):
        words = argv.words(args, WHO)
        return dict(argv.options(words, KEYS, WHO, claims=_claims, abbreviate=True))
    if isinstance(args, Mapping):
        items = dict(args)
    elif hasattr(args, "speculative_algorithm"):
        found = {name: getattr(args, name) for name in dir(args) if name.startswith("speculative_")}
        items = {name: value for name, value in found.items() if not callable(value)}
    else:
        raise TypeError(
            f"{WHO}: expected words, a command line, or server arguments with "
            f"speculative_algorithm, got {type(args).__name__}"
        )
    names = {spelled: name for name, key in KEYS.items() for spelled in (name, *key.names)}
    given = {}
    for key, value in items.items():
        flag = "--" + str(key).lstrip("-").replace("_", "-")
        if flag in names:
            given[names[flag]] = value
        elif _claims(flag):
            raise unknown(WHO, key, (name.lstrip("-").replace("-", "_") for name in names))
    return given


def _claims(flag: str) -> bool:
    return flag.startswith(("--spec-", "--specu", "--no-spec"))


def _take_model(reading: Reading, algorithm: str, values: dict[str, Any]) -> None:
    method = METHODS[algorithm]
    model = values.pop(MODEL, None) if algorithm != "NGRAM" else None
    if model is None and algorithm in NEEDS_MODEL:
        raise ValueError(f"{WHO}: expected {MODEL} with {algorithm}, got none")
    if model is None and algorithm == "EAGLE":
        method = "mtp"
    reading.settings["method"] = method
    if model is not None:
        reading.settings["model"] = model


def _take_rule(reading: Reading, algorithm: str, values: dict[str, Any]) -> None:
    rejection, block = values.pop(REJECTION, False), values.pop(BLOCK, False)
    flag = BLOCK if block else REJECTION
    sampled = (*EAGLES, "DFLASH", "DSPARK") if block else EAGLES
    if not rejection and not block:
        reading.defaults["draft_sample_method"] = "greedy"
        return
    if algorithm not in sampled:
        raise ValueError(f"{WHO}: {flag}: expected one of {', '.join(sampled)}, got {algorithm}")
    if values.get(TOPK, 1) != 1:
        raise ValueError(f"{WHO}: {flag}: expected {TOPK} 1, got {values[TOPK]}")
    reading.settings["draft_sample_method"] = "probabilistic"
    if block:
        reading.settings["rule"] = "block"


def _take_ngram(reading: Reading, values: dict[str, Any]) -> None:
    """A match and at least one token after it make a path of the trie."""
    tokens = values.pop(TOKENS, NGRAM_TOKENS)
    depth = values.pop(DEPTH, KEYS[DEPTH].default)
    _at_least(TOKENS, tokens, 2)
    _at_least(DEPTH, depth, 2)
    reading.settings |= {
        "num_speculative_tokens": tokens - 1,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": depth - 1,
        "prompt_lookup_matches": values.pop(BREADTH, KEYS[BREADTH].default),
    }


def _take_block(reading: Reading, algorithm: str, values: dict[str, Any]) -> None:
    """The block of DFLASH counts the root, that of DSPARK does not; tokens always do. Chains."""
    reading.defaults["draft_tree_topk"] = 1
    flag, root = (DFLASH, 0) if algorithm == "DFLASH" else (DSPARK, 1)
    block, tokens = values.pop(flag, None), values.pop(TOKENS, None)
    if block is not None and tokens not in (None, block + root):
        raise ValueError(f"{WHO}: {flag} {block} and {TOKENS} {tokens} disagree")
    if block is not None:
        tokens = block + root
    if tokens is not None:
        _at_least(TOKENS, tokens, 2)
        reading.settings["num_speculative_tokens"] = tokens - 1


def _take_tree(reading: Reading, algorithm: str, values: dict[str, Any]) -> None:
    """SGLang's tree: `steps` levels of the `topk` best tokens, of which `tokens` are verified."""
    adaptive, steps, topk = values.get(ADAPTIVE), values.pop(STEPS, None), values.pop(TOPK, None)
    tokens = values.pop(TOKENS, None)
    if adaptive and algorithm in EAGLES and topk in (None, 1):
        values.pop(ADAPTIVE)
        reading.settings["max_speculative_tokens"] = MOST_ADAPTIVE_STEPS
        return
    if steps is topk is tokens is None:
        if algorithm != "STANDALONE":
            return  # SGLang's choice depends on the target; ours adapts
        steps, topk, tokens = STANDALONE_SHAPE
    if steps is None or topk is None or (tokens is None and topk > 1):
        raise ValueError(f"{WHO}: expected {STEPS}, {TOPK} and {TOKENS} together, or none of them")
    _at_least(STEPS, steps, 1)
    _at_least(TOPK, topk, 1)
    if topk == 1:
        if tokens not in (None, steps + 1):
            reading.has_no_effect(TOKENS, tokens, f"with {TOPK} 1 it is {STEPS} + 1")
        reading.settings["num_speculative_tokens"] = steps
        reading.defaults["draft_tree_topk"] = 1
        return
    _at_least(TOKENS, tokens, 2)
    reading.settings |= {"num_speculative_tokens": tokens - 1, "draft_tree_topk": topk}
    reading.has_no_effect(STEPS, steps, "a tree is as deep as its best paths")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{WHO}: {name}: expected at least {least}, got {value}")
