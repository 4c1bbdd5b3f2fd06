"""examples/train_head.py and train_draft.py: what is learnt is what drafting asks, and it loads."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from eagle_heads import DIM, EPS, HEADS, INTER, KV_HEADS, THETA, D, Dense

import specdec_kernels as sdk

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCAB, DRAFTED = 60, 40


@pytest.fixture(scope="module")
def examples():
    """Their modules by name; they import each other as scripts do."""
    sys.path.insert(0, str(EXAMPLES))
    yield {path.stem: importlib.import_module(path.stem) for path in EXAMPLES.glob("*.py")}
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def target():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=INTER,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def network_of(examples, method, target, seed=1):
    """With weights that all matter."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFTED]
    network = examples["networks"].NETWORKS[method](target, ids.sort().values)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=g))
                parameter += parameter.dim() == 1
    return network


def texts_of(lens, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=g) for n in lens]


def batch_of(examples, network, target, texts):
    read = examples["distill"].read(target, texts, examples["networks"].hidden_layers(target))
    if not network.config.fused:
        read = [text._replace(features=text.last) for text in read]
    return examples["fitting"].padded(read)


@torch.no_grad()
def own_answers(target):
    """Few different ones: a little training goes a long way."""
    prompts = torch.stack(texts_of([6] * 3)).repeat(10, 1)
    return list(target.generate(prompts, max_new_tokens=40, do_sample=False))


def expect_drafts(target, **options):
    """The text of the target alone, and tokens accepted."""
    ids = texts_of([6])[0][None]
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    with sdk.patched(target, num_speculative_tokens=3, **options):
        assert torch.equal(target.generate(ids, max_new_tokens=40, do_sample=False), plain)
        metrics = sdk.metrics(target).snapshot()
    assert metrics["num_accepted_tokens"] > 0.4 * metrics["num_draft_tokens"] > 0


@torch.no_grad()
def test_training_sees_what_drafting_will(examples, target):
    """Three steps from slot n - 2 of a text, its drafts behind it, by the reference's own words."""
    network = network_of(examples, "eagle3", target)
    weights = dict(network.state_dict())
    weights["d2t"] = network.target_ids - torch.arange(DRAFTED)
    dense = Dense(target, weights, network.config.hidden_layers, norm_output=True)
    texts = [text.tolist() for text in texts_of([9, 5, 14])]
    paths = [dense.chain(text, 3) for text in texts]
    full = [torch.tensor(text + path) for text, path in zip(texts, paths, strict=True)]
    batch = batch_of(examples, network, target, full)
    hidden = network.fuse(batch.features)
    steps = examples["unrolled"].steps(network, batch, 3, hidden)
    for step, (out, last, inside) in enumerate(steps):
        drafted = network.target_ids[network.logits(out).argmax(-1)]
        for b, (text, path) in enumerate(zip(texts, paths, strict=True)):
            slot = len(text) - 2
            assert int(drafted[b, slot]) == path[step]
            assert inside[b].tolist() == [
                i + step + 1 < len(full[b]) for i in range(len(inside[b]))
            ]
            state = target.get_decoder()(full[b][None]).last_hidden_state[0]
            count = len(full[b]) - step - 1
            torch.testing.assert_close(last[b, :count], state[step + 1 :])


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_is_trained_and_drafts(examples, target, method, tmp_path):
    """The loss falls; the written head drafts what the network says, and texts stay as they are."""
    settings = "--updates 60 --warmup 3 --batch 128 --report 20"
    options = examples["train_head"]._options(["--out", str(tmp_path), *settings.split()])
    layers = examples["networks"].hidden_layers(target)
    texts = examples["distill"].read(target, own_answers(target), layers)
    torch.manual_seed(0)
    network = examples["networks"].NETWORKS[method](target, torch.arange(VOCAB))
    own = texts if network.config.fused else [t._replace(features=t.last) for t in texts]
    steps = examples["networks"].STEPS[method]
    record = examples["train_head"].train(network, target, own, steps, options)
    assert [r["update"] for r in record] == [20, 40, 60]
    assert record[-1]["loss"] < record[0]["loss"]
    assert record[-1]["agreement"][0] > 0.5
    network.save(tmp_path / "head", target)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expect_drafts(target, method=method, model=str(tmp_path / "head"))


def test_a_draft_is_trained_and_drafts(examples, target, tmp_path):
    settings = "--hidden-size 24 --heads 3 --layers 2 --updates 150 --warmup 3 --batch 128"
    options = examples["train_draft"]._options(["--out", str(tmp_path), *settings.split()])
    texts = examples["distill"].read(target, own_answers(target), ())
    torch.manual_seed(0)
    draft, record = examples["train_draft"].train(target, texts, options)
    assert record[-1]["agreement"][0] > 0.5
    draft.eval().save_pretrained(tmp_path)
    expect_drafts(target, method="draft_model", model=str(tmp_path))


def test_the_same_seed_gives_the_same_prompts(examples):
    corpus = examples["corpus"]
    assert list(corpus.prompts(20, 3)) == list(corpus.prompts(20, 3))
    assert list(corpus.prompts(20, 3)) != list(corpus.prompts(20, 4))
    assert all("test" not in path.name.split("_") for path in corpus.sources())


def test_batches_hold_every_text_once_and_keep_their_size(examples):
    fitting, Text = examples["fitting"], examples["distill"].Text
    texts = [Text(ids, ids[:, None], ids[:, None]) for ids in texts_of(range(2, 60))]
    batches = fitting.batches_of(texts, 64, random.Random(0))
    assert sorted(len(t.ids) for batch in batches for t in batch) == list(range(2, 60))
    assert all(len(b) * max(len(t.ids) for t in b) <= 64 or len(b) == 1 for b in batches)
