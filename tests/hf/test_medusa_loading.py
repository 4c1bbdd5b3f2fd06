"""Medusa heads on disk: both formats, and everything that can be wrong with them."""

import json

import pytest
import torch
from test_medusa import CHOICES, random_heads, write
from tiny import VOCAB, accelerated, batch, fresh, new_tokens, random_rows

import specdec_kernels as sdk
from specdec_kernels.hf.medusa import load_heads

FORMATS = ["pt", "safetensors"]


def test_levels_may_be_fewer_than_heads(tmp_path):
    target = fresh("llama")
    heads = write(tmp_path / "h", random_heads(4))
    options = dict(method="medusa", model=heads, num_speculative_tokens=8)
    inputs = batch(random_rows((3, 9), seed=1))
    for depth, topk in ((2, 1), (1, 3), (9, 1)):
        with accelerated(
            target, draft_tree_depth=depth, draft_tree_topk=topk, **options
        ) as metrics:
            new_tokens(target, inputs)
        assert len(metrics.accepted_per_position) <= min(depth, 4)
        most = max(metrics.num_draft_tokens / metrics.num_drafts, 0)
        assert min(depth, 4) - 0.5 < most <= min(depth, 4)


def refused(model, heads, match, error=ValueError, **options):
    with pytest.raises(error, match=match):
        sdk.patch(model, method="medusa", model=heads, **options)
    with pytest.raises(ValueError, match="expected a patched model"):
        sdk.metrics(model)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_formats_and_what_config_says_does_not_matter(form, prefix, tmp_path):
    target, weights = fresh("llama"), random_heads(3, layers=2)
    folder = write(tmp_path / "h", weights, form, prefix)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 5, "medusa_num_layers": 1}))
    file = folder / f"medusa_lm_head.{form}"
    for source in (folder, str(folder), file):
        heads = load_heads(source, target, "auto")
        assert heads.number == 3 and [len(head) for head in heads.heads] == [3] * 3
        for name, value in heads.heads.state_dict().items():
            assert torch.equal(value, weights[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_take_the_dtype_of_the_target(dtype, tmp_path):
    target = fresh("llama").to(dtype)
    heads = write(tmp_path / "h", random_heads())
    inputs = batch(random_rows((3, 9), seed=1))
    for linear in ("auto", "off", "invariant"):
        with accelerated(target, method="medusa", model=heads, linear=linear) as metrics:
            new_tokens(target, inputs)
        assert metrics.num_draft_tokens > 0
    assert {p.dtype for p in load_heads(heads, target, "off").heads.parameters()} == {dtype}
    if dtype == torch.float16:
        huge = write(tmp_path / "i", random_heads(scale=1e6))
        refused(target, huge, "finite weights in torch.float16, got others in 0.1.weight")


@pytest.mark.parametrize("vocab", [VOCAB + 32, VOCAB - 16])
def test_c18_padding_of_the_vocabulary(vocab, tmp_path):
    """Ids beyond the target's are never drafted, however likely the heads find them."""
    target = fresh("llama")
    weights = random_heads(vocab=vocab)
    for name in weights:
        if name.endswith("1.weight"):
            weights[name][VOCAB:] *= 100
    inputs = batch(random_rows((3, 9), seed=1))
    expected = new_tokens(target, inputs)
    heads = write(tmp_path / "h", weights)
    with accelerated(target, method="medusa", model=heads, num_speculative_tokens=6) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.num_draft_tokens > 0


def test_heads_of_another_target(tmp_path):
    target = fresh("llama")
    refused(
        target,
        write(tmp_path / "a", random_heads(size=48)),
        r"0.0.linear.weight: expected the target's hidden size of 32 at the end, got \[48, 48\]",
    )
    refused(
        target,
        write(tmp_path / "b", random_heads(vocab=VOCAB + 200)),
        rf"0.1.weight: expected the target's vocabulary of {VOCAB} in front, got \[296, 32\]",
    )
    weights = random_heads()
    weights["1.0.linear.weight"] = weights["1.0.linear.weight"][:16]
    refused(target, write(tmp_path / "c", weights), r"1.0.linear.weight: expected \[32, 32\]")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value, tmp_path):
    weights = random_heads()
    weights["2.0.linear.bias"][5] = value
    refused(fresh("llama"), write(tmp_path / "h", weights), "finite weights .* in 2.0.linear.bias")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.95])
def test_truncated_files(form, share, tmp_path):
    folder = write(tmp_path / "h", random_heads(), form)
    file = folder / f"medusa_lm_head.{form}"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    refused(fresh("llama"), folder, "expected a whole file of tensors, got .*medusa_lm_head")


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"0.0.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    refused(fresh("llama"), tmp_path, "expected a whole file of tensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "gone, match",
    [
        (["1."], "expected heads 0 to 2, got only 0, 2"),
        (["0."], "expected heads 0 to 2, got only 1, 2"),
        (["1.0.linear.bias"], "expected 1.0.linear.bias, got only 1.1.weight"),
        (["1.0."], "expected 1.0.linear.weight, got only 1.1.weight"),
        (["2.1."], "expected 2.0.weight, got only 2.0.linear.bias, 2.0.linear.weight"),
        ([""], "expected Medusa heads, got none"),
    ],
)
def test_missing_weights(gone, match, tmp_path):
    weights = {k: v for k, v in random_heads().items() if not k.startswith(tuple(gone))}
    refused(fresh("llama"), write(tmp_path / "h", weights), match)


def test_other_things_in_the_file(tmp_path):
    weights = {**random_heads(), "model.embed_tokens.weight": torch.zeros(2, 2)}
    refused(fresh("llama"), write(tmp_path / "a", weights), "got 'model.embed_tokens.weight'")
    weights = {**random_heads(), "1.1.bias": torch.zeros(VOCAB)}
    refused(fresh("llama"), write(tmp_path / "b", weights), "head 1: unexpected 1.1.bias")
    torch.save([torch.zeros(2)], tmp_path / "medusa_lm_head.pt")
    refused(fresh("llama"), tmp_path, "expected Medusa heads, got none")


def test_no_file(tmp_path):
    for source in (tmp_path, tmp_path / "missing.pt"):
        refused(fresh("llama"), source, "medusa_lm_head.safetensors or medusa_lm_head.pt, got")
    refused(fresh("llama"), fresh("llama"), "Hub id of Medusa heads, got Llama", TypeError)


def test_a_repository_of_the_hub(tmp_path, monkeypatch):
    file = write(tmp_path / "h", random_heads()) / "medusa_lm_head.pt"

    def cached_file(source, name):
        if (source, name) != ("someone/heads", file.name):
            raise OSError("no such file there")
        return str(file)

    monkeypatch.setattr("specdec_kernels.hf.medusa.cached_file", cached_file)
    target = fresh("llama")
    assert load_heads("someone/heads", target, "off").number == 3
    refused(target, "someone/nothing", "medusa_lm_head.pt, got 'someone/nothing'")


def test_options_that_do_not_fit(tmp_path):
    model, heads = fresh("llama"), write(tmp_path / "h", random_heads())
    for choices, error, match in (
        ([[0, 0]], ValueError, r"expected \(0,\) too, the parent of \(0, 0\)"),
        ([[0], [-1]], ValueError, r"paths of ranks from 0 on, got \[-1\]"),
        ([0], ValueError, "paths of ranks from 0 on, got 0"),
        ([], ValueError, "expected at least one path"),
        (7, TypeError, "expected a list of paths"),
        ("mc_sim_7b_63", ValueError, "paths of at most 3 levels"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], ValueError, "paths of at most 3 levels"),
    ):
        refused(model, heads, match, error, medusa_choices=choices)
    refused(model, heads, "expected none with medusa_choices", draft_tree_topk=2,
            medusa_choices=CHOICES)  # fmt: skip
    refused(model, heads, "expected a chain with rule 'block'", rule="block",
            medusa_choices=CHOICES)  # fmt: skip
    refused(model, heads, "expected 1 with rule 'block', got 3", rule="block", draft_tree_topk=3)
    refused(model, heads, "expected greedy", draft_sample_method="probabilistic")
    refused(model, None, "expected a draft model or heads for method 'medusa', got None")
    with pytest.raises(ValueError, match="medusa_choices: expected method 'medusa', got 'ngram'"):
        sdk.patch(model, medusa_choices=CHOICES)
