"""llama.cpp's --spec options, as of October 2026."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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

WHO = "from_llama_cpp"
DEVICE = "threads, devices and formats of the drafter cannot change what is generated"
NOT_SAMPLED = "the output would not be the model's"
TYPE = "--spec-type"
PRESET = "--spec-default"
MODEL = "--spec-draft-model"
REPOSITORY = "--spec-draft-hf"
N_MAX = "--spec-draft-n-max"
N_MIN = "--spec-draft-n-min"
P_MIN = "--spec-draft-p-min"


def types(value: Any) -> list[str]:
    return text(value).split(",")


def repository(value: Any) -> str:
    """A Hub id; the format behind its colon is a choice between files."""
    return text(value).split(":")[0]


def _ngram_map(name: str) -> dict[str, Key]:
    return {
        f"--spec-{name}-size-n": mapped("prompt_lookup_min, prompt_lookup_max", 12, whole),
        f"--spec-{name}-size-m": mapped("num_speculative_tokens", 48, whole),
        f"--spec-{name}-min-hits": harmless("one match is enough", 1, whole),
    }


def _removed(instead: str, *names: str) -> Key:
    return refused(f"llama.cpp has removed it; use {instead}", parse=text, names=names)


KEYS: dict[str, Key] = {
    TYPE: mapped("method", parse=types),
    PRESET: mapped("method", parse=switch),
    MODEL: mapped("model", parse=text, names=("-md", "--model-draft")),
    REPOSITORY: mapped("model", parse=repository, names=("-hfd", "-hfrd", "--hf-repo-draft")),
    N_MAX: mapped("num_speculative_tokens", 3, whole),
    N_MIN: mapped("draft_min_tokens", 0, whole),
    P_MIN: mapped("draft_p_min", 0.0, number, names=("--draft-p-min",)),
    "--spec-draft-p-split": harmless(
        "llama.cpp's server does not read it", 0.1, number, names=("--draft-p-split",)
    ),
    "--spec-ngram-mod-n-match": mapped("prompt_lookup_min, prompt_lookup_max", 24, whole),
    "--spec-ngram-mod-n-max": mapped("num_speculative_tokens", 64, whole),
    "--spec-ngram-mod-n-min": harmless("n-gram drafts of any length are used", 48, whole),
    **_ngram_map("ngram-simple"),
    **_ngram_map("ngram-map-k"),
    **_ngram_map("ngram-map-k4v"),
    "--lookup-cache-static": refused("no lookup cache is read from files", names=("-lcs",)),
    "--lookup-cache-dynamic": refused("no lookup cache is read from files", names=("-lcd",)),
    "--spec-synth-len": refused(NOT_SAMPLED),
    "--spec-synth-rates": refused(NOT_SAMPLED),
    "--draft-max": _removed(f"{N_MAX} or --spec-ngram-mod-n-max", "--draft", "--draft-n"),
    "--draft-min": _removed(f"{N_MIN} or --spec-ngram-mod-n-min", "--draft-n-min"),
    "--spec-ngram-size-n": _removed("--spec-ngram-simple-size-n or that of another type"),
    "--spec-ngram-size-m": _removed("--spec-ngram-simple-size-m or that of another type"),
    "--spec-ngram-min-hits": _removed("--spec-ngram-simple-min-hits or that of another type"),
    "--spec-draft-backend-sampling": harmless(
        DEVICE, True, switch, names=("--no-spec-draft-backend-sampling",)
    ),
    "--spec-draft-type-k": harmless(DEVICE, "f16", names=("-ctkd", "--cache-type-k-draft")),
    "--spec-draft-type-v": harmless(DEVICE, "f16", names=("-ctvd", "--cache-type-v-draft")),
    "--spec-draft-ngl": harmless(
        DEVICE, "auto", names=("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft")
    ),
    "--spec-draft-device": harmless(DEVICE, names=("-devd", "--device-draft")),
    "--spec-draft-threads": harmless(DEVICE, names=("-td", "--threads-draft")),
    "--spec-draft-threads-batch": harmless(DEVICE, names=("-tbd", "--threads-batch-draft")),
    "--spec-draft-cpu-mask": harmless(DEVICE, names=("-Cd", "--cpu-mask-draft")),
    "--spec-draft-cpu-range": harmless(DEVICE, names=("-Crd", "--cpu-range-draft")),
    "--spec-draft-cpu-strict": harmless(DEVICE, names=("--cpu-strict-draft",)),
    "--spec-draft-prio": harmless(DEVICE, names=("--prio-draft",)),
    "--spec-draft-poll": harmless(DEVICE, names=("--poll-draft",)),
    "--spec-draft-cpu-mask-batch": harmless(DEVICE, names=("-Cbd", "--cpu-mask-batch-draft")),
    "--spec-draft-cpu-range-batch": harmless(DEVICE, names=("-Crbd", "--cpu-range-batch-draft")),
    "--spec-draft-cpu-strict-batch": harmless(DEVICE, names=("--cpu-strict-batch-draft",)),
    "--spec-draft-prio-batch": harmless(DEVICE, names=("--prio-batch-draft",)),
    "--spec-draft-poll-batch": harmless(DEVICE, names=("--poll-batch-draft",)),
    "--spec-draft-override-tensor": harmless(DEVICE, names=("-otd", "--override-tensor-draft")),
    "--spec-draft-cpu-moe": harmless(DEVICE, False, switch, names=("-cmoed", "--cpu-moe-draft")),
    "--spec-draft-n-cpu-moe": harmless(
        DEVICE, names=("--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft")
    ),
}


@dataclass(frozen=True)
class Type:
    """One --spec-type: our method, and per setting the option that holds it or a value."""

    method: str
    settings: dict[str, Any]


def _lookup(size: str, most: str) -> Type:
    """The last `size` tokens, exactly, found earlier: one draft of `most` tokens."""
    return Type(
        "ngram",
        {
            "prompt_lookup_min": size,
            "prompt_lookup_max": size,
            "prompt_lookup_matches": 1,
            "num_speculative_tokens": most,
        },
    )


DRAFTED = {"num_speculative_tokens": N_MAX, "draft_min_tokens": N_MIN, "draft_p_min": P_MIN}
TYPES = {
    "none": Type("none", {}),
    "draft-simple": Type("draft_model", DRAFTED),
    "draft-eagle3": Type("eagle3", DRAFTED),
    "draft-mtp": Type("mtp", DRAFTED),
    "draft-dflash": Type("dflash", DRAFTED),
    "draft-dspark": Type("dspark", DRAFTED),
    "ngram-simple": _lookup("--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"),
    "ngram-map-k": _lookup("--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m"),
    "ngram-map-k4v": _lookup("--spec-ngram-map-k4v-size-n", "--spec-ngram-map-k4v-size-m"),
    "ngram-mod": _lookup("--spec-ngram-mod-n-match", "--spec-ngram-mod-n-max"),
    # Its n-grams have 1 to 4 tokens, its drafts 8.
    "ngram-cache": Type(
        "ngram",
        {
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
            "prompt_lookup_matches": 1,
            "num_speculative_tokens": 8,
        },
    ),
}
ALWAYS_SAID = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
NEEDS_MODEL = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")


def read(args: str | Iterable[str]) -> Reading:
    """Words of a command line, or a shell string.

    Options of other types than the one named have no effect, there as here.

    Raises:
        ValueError: an unknown, removed or refused option, an unknown type, several types that
            are one method here, a draft model without a type, a missing value.
        TypeError: `args` holds something else than text.
    """
    reading = Reading(WHO)
    given: dict[str, Any] = {}
    named: list[str] = []
    for name, value in argv.options(argv.words(args, WHO), KEYS, WHO, claims=_claims):
        if name == TYPE:
            named += types(value)
        elif name == PRESET:
            named.append("ngram-mod")
            given = {k: v for k, v in given.items() if not k.startswith("--spec-ngram-mod-")}
        else:
            given[name] = value
    values = reading.sort(KEYS, given)
    kinds = _types(named, values)
    if len(kinds) == 1:
        _take(reading, kinds[0], values)
    else:
        _take_all(reading, kinds, values)
    for name, value in values.items():
        reading.has_no_effect(name, value, f"{TYPE} {','.join(kinds)} does not use it")
    return reading


def _claims(flag: str) -> bool:
    long = flag.startswith("--")
    return flag.startswith(("--spec-", "--no-spec-", "--draft")) or (
        long and flag.endswith("-draft")
    )


def _types(named: list[str], values: dict[str, Any]) -> list[str]:
    """At least one; those without a model go first, as in llama.cpp."""
    for name in named:
        if name not in TYPES:
            raise unknown(WHO, name, TYPES, "type")
    kinds = list(dict.fromkeys(name for name in named if name != "none"))
    kinds.sort(key=lambda kind: kind.startswith("draft-"))
    methods = [TYPES[kind].method for kind in kinds]
    if len(set(methods)) < len(methods) or sum(kind.startswith("draft-") for kind in kinds) > 1:
        raise ValueError(
            f"{WHO}: {TYPE}: expected at most one type without and one with a model, "
            f"got {', '.join(kinds)}: the n-gram types are one method here"
        )
    if not kinds and not named and (MODEL in values or REPOSITORY in values):
        raise ValueError(
            f"{WHO}: expected {TYPE} with a draft model, got none: llama.cpp reads the type from "
            "the file, and drafts with an ordinary model under draft-simple only"
        )
    return kinds or ["none"]


def _take_all(reading: Reading, kinds: list[str], values: dict[str, Any]) -> None:
    """Several types: a row takes the first that drafts. Their numbers of tokens differ: the number
    adapts, up to the largest.
    """
    most, methods = [], []
    for kind in kinds:
        part = Reading(WHO)
        _take(part, kind, values)
        methods.append(part.settings.pop("method"))
        most.append(part.settings.pop("num_speculative_tokens", 0))
        reading.settings |= part.settings
        reading.defaults |= part.defaults
    drafting = [method for method in methods if method != "none"]
    reading.settings["method"] = ",".join(drafting) or "none"
    if drafting:
        reading.settings["max_speculative_tokens"] = max(most)


def _take(reading: Reading, kind: str, values: dict[str, Any]) -> None:
    """Moves what the type uses from `values` to the reading."""
    chosen = TYPES[kind]
    reading.settings["method"] = chosen.method
    if kind.startswith("draft-"):
        path = values.pop(MODEL, None)
        model = values.pop(REPOSITORY, path)  # with a repository, the path names a file in it
        if model is None and kind in NEEDS_MODEL:
            raise ValueError(f"{WHO}: expected {MODEL} with {TYPE} {kind}, got none")
        if model is not None:
            reading.settings["model"] = model
        reading.defaults |= {"draft_tree_topk": 1, "draft_sample_method": "greedy"}
    for name, source in chosen.settings.items():
        if source not in KEYS:
            reading.settings[name] = source
        elif source in values or name in ALWAYS_SAID:
            reading.settings[name] = values.get(source, KEYS[source].default)
        else:
            reading.defaults[name] = KEYS[source].default
    for source in chosen.settings.values():
        values.pop(source, None)
    if reading.settings.get("num_speculative_tokens") == 0:
        reading.settings = {"method": "none"}
