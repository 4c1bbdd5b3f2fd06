"""Medusa heads as the source of guesses, through generate."""

import pytest
import torch
from test_sampling import FALSE_ALARM, PLAIN, SMALL, WARPED, V, draw, joints, pvalues
from tiny import VOCAB, accelerated, batch, fresh, new_tokens, random_rows

from specdec_kernels.drafting.medusa import MedusaDrafter

CHOICES = [[0], [1], [0, 0], [0, 1], [2], [0, 0, 0], [1, 0], [0, 0, 1]]
SHAPES = {
    "chain": dict(draft_tree_topk=1),
    "tree": dict(),
    "choices": dict(medusa_choices=CHOICES),
}


def random_heads(number=3, layers=1, size=32, vocab=VOCAB, seed=0, scale=1.0):
    """A state dict in Medusa's format."""
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for i in range(number):
        for j in range(layers):
            weights[f"{i}.{j}.linear.weight"] = torch.randn(size, size, generator=g) * 0.1
            weights[f"{i}.{j}.linear.bias"] = torch.randn(size, generator=g) * 0.1
        weights[f"{i}.{layers}.weight"] = torch.randn(vocab, size, generator=g) * scale
    return weights


def write(folder, weights, form="pt", prefix=""):
    """The folder, with the heads in it."""
    weights = {prefix + key: value for key, value in weights.items()}
    folder.mkdir(exist_ok=True)
    if form == "pt":
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        from safetensors.torch import save_file

        save_file(weights, folder / "medusa_lm_head.safetensors")
    return folder


def own_heads(model, number=3):
    """Heads that repeat what the target's lm_head says: right where a text repeats its tokens."""
    weight = model.get_output_embeddings().weight.detach().clone()
    return {f"{i}.0.weight": weight.clone() for i in range(number)}


@torch.no_grad()
def head_logits(weights, states, i):
    """What head i says, computed from the state dict alone."""
    j = 0
    while f"{i}.{j}.linear.weight" in weights:
        y = states @ weights[f"{i}.{j}.linear.weight"].T + weights[f"{i}.{j}.linear.bias"]
        states = states + y * torch.sigmoid(y)
        j += 1
    return states @ weights[f"{i}.{j}.weight"].T


def fitted_heads(model, texts, number=3):
    """Heads, by least squares, that know what follows in `texts` of fewer states than numbers.

    Head i reads the state that chose token t + 1 and says token t + 2 + i.
    """
    size = model.config.hidden_size
    states, following = [], []
    for text in texts:
        with torch.no_grad():
            hidden = model.model(torch.tensor([text])).last_hidden_state[0].double()
        for t in range(len(text) - 2 - number):
            states.append(hidden[t])
            following.append(text[t + 2 : t + 2 + number])
    states, following = torch.stack(states), torch.tensor(following)
    assert len(states) <= size
    weights = {}
    for i in range(number):
        wanted = torch.nn.functional.one_hot(following[:, i], VOCAB).double()
        weights[f"{i}.0.weight"] = torch.linalg.lstsq(states, wanted).solution.T.float() * 50
    return weights


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_greedy_text_is_that_of_the_target(name, shape, tmp_path):
    """B01, B15, C17, C21: one row and ragged ones, heads that know nothing and some that do."""
    target = fresh(name)
    rows = random_rows((3, 9, 21), seed=1)
    for i, weights in enumerate((random_heads(), own_heads(target))):
        heads = write(tmp_path / str(i), weights)
        for inputs in (batch(rows[1:2]), batch(rows)):
            expected = new_tokens(target, inputs, max_new_tokens=32)
            for size in (7, None):
                options = dict(model=heads, num_speculative_tokens=size, **SHAPES[shape])
                with accelerated(target, method="medusa", **options) as metrics:
                    assert new_tokens(target, inputs, max_new_tokens=32) == expected
                assert size is None or metrics.num_draft_tokens > 0


def watch(monkeypatch):
    """What every step proposes: the committed text of each row, the tree, the limits."""
    steps, propose = [], MedusaDrafter.propose

    def watched(self, tokens, lens, sampling, max_nodes, max_depth):
        tree = propose(self, tokens, lens, sampling, max_nodes, max_depth)
        texts = [row[:n].tolist() for row, n in zip(tokens, lens, strict=True)]
        steps.append((texts, tree, list(max_nodes), list(max_depth)))
        return tree

    monkeypatch.setattr(MedusaDrafter, "propose", watched)
    return steps


def every_path(logprobs, topk, depth, choices=None):
    """Paths of token ids with their scores, best first; shorter and lower ranks first if equal."""
    level, found = [((), (), 0.0)], []
    for row in logprobs[:depth]:
        values, ids = row.sort(descending=True, stable=True)
        level = [
            ((*ranks, r), (*path, int(ids[r])), score + float(values[r]))
            for ranks, path, score in level
            for r in range(topk)
        ]
        level = [node for node in level if choices is None or node[0] in choices]
        found += level
    return [path for _, path, _ in sorted(found, key=lambda n: (-n[2], len(n[0]), n[0]))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_c16_every_draft_is_what_the_heads_say(shape, layers, tmp_path, monkeypatch):
    """Against all paths by the state dict, from the state of the token before the root."""
    target, number = fresh("llama"), 3
    weights = random_heads(number, layers, scale=0.7)
    if not layers:
        weights = own_heads(target, number)
    options = SHAPES[shape]
    choices = {tuple(path) for path in CHOICES} if shape == "choices" else None
    topk = 1 if shape == "chain" else 10
    steps = watch(monkeypatch)
    heads = write(tmp_path / "heads", weights)
    with accelerated(
        target, method="medusa", model=heads, num_speculative_tokens=6, **options
    ) as metrics:
        new_tokens(target, batch(random_rows((3, 9, 14), seed=2)), max_new_tokens=24)
    assert metrics.num_draft_tokens > 30
    for texts, tree, max_nodes, max_depth in steps:
        for b, text in enumerate(texts):
            if max_nodes[b] == 0:
                assert tree.num_nodes[b] == 0
                continue
            with torch.no_grad():
                state = target.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
            logprobs = [head_logits(weights, state, i).log_softmax(-1) for i in range(number)]
            expected = every_path(logprobs, topk, max_depth[b], choices)
            paths = [()]
            nodes = int(tree.num_nodes[b])
            for slot in range(1, nodes):
                parent = paths[int(tree.parents[b, slot])]
                paths.append((*parent, int(tree.draft_token_ids[b, slot])))
            assert tree.draft_token_ids[b, 0] == text[-1]
            assert paths[1:] == expected[: max_nodes[b] - 1]


@pytest.mark.parametrize("shape", SHAPES)
def test_b05_heads_that_know_the_text_are_always_right(shape, tmp_path, monkeypatch):
    """No state is off by one: all that is drafted on the best path stands, in every row."""
    target, number = fresh("llama"), 3
    rows = random_rows((3, 9), seed=3)
    texts = new_tokens(target, batch(rows), max_new_tokens=14)
    heads = fitted_heads(target, [r + t for r, t in zip(rows, texts, strict=True)], number)
    steps = watch(monkeypatch)
    options = dict(model=write(tmp_path / "h", heads), num_speculative_tokens=6, **SHAPES[shape])
    with accelerated(target, method="medusa", **options) as metrics:
        assert new_tokens(target, batch(rows), max_new_tokens=12) == [t[:12] for t in texts]
    assert len(steps) == 3  # 1 + 4 + 4 + 3 tokens
    assert metrics.accepted_per_position == [6, 6, 4]


@pytest.mark.parametrize(
    "shape, rule, settings",
    [
        ("chain", "block", "warped"),
        ("chain", "token", "plain"),
        ("tree", "auto", "plain"),
        ("tree", "recursive", "warped"),
        ("choices", "auto", "warped"),
    ],
)
def test_a01_a02_a03_exact_joint(shape, rule, settings, tmp_path):
    model = fresh("llama", **SMALL)
    heads = write(tmp_path / "h", random_heads(3, 1, SMALL["hidden_size"], V, scale=0.5))
    torch.manual_seed(4)
    options = dict(model=heads, num_speculative_tokens=4, rule=rule, **SHAPES[shape])
    with accelerated(model, method="medusa", **options) as metrics:
        counts = draw(model, 6_300, **(WARPED if settings == "warped" else PLAIN))
    assert 0.02 < metrics.acceptance_rate < 0.98
    assert min(pvalues(counts, joints(settings))) > FALSE_ALARM


def test_a29_coupled_text_does_not_depend_on_the_heads(tmp_path):
    """In the kernel, with edited logits, and on the walk."""
    target = fresh("phi3")
    inputs = batch(random_rows((3, 9, 14), seed=5))
    heads = write(tmp_path / "h", own_heads(target))
    for extra in (dict(repetition_penalty=1.1, top_k=40), dict(no_repeat_ngram_size=4)):
        options = dict(do_sample=True, temperature=0.6, max_new_tokens=24, **extra)
        with accelerated(target, seed=7, method="none"):
            expected = new_tokens(target, inputs, **options)
        for shape in SHAPES.values():
            with accelerated(target, seed=7, method="medusa", model=heads, **shape) as metrics:
                assert new_tokens(target, inputs, **options) == expected
            assert metrics.num_draft_tokens > 0


def test_typical_rule_accepts_more_and_says_so(tmp_path):
    target = fresh("phi3")
    inputs = batch(random_rows((3, 9, 14), seed=5))
    options = dict(do_sample=True, max_new_tokens=24, top_k=0)
    heads = write(tmp_path / "h", random_heads())
    lengths = {}
    for rule in ("auto", "typical"):
        given = dict(model=heads, rule=rule, seed=3, num_speculative_tokens=8)
        given |= dict(posterior_threshold=0.0, posterior_alpha=0.0)
        allowed = "rule 'typical' is lossy" if rule == "typical" else None
        with accelerated(target, allowed, method="medusa", **given) as metrics:
            new_tokens(target, inputs, **options)
        lengths[rule] = metrics.mean_acceptance_length
    assert lengths["typical"] > lengths["auto"]


@pytest.mark.parametrize("shape", SHAPES)
def test_d01_c02_c22_ends_of_text_inside_drafts(shape, tmp_path):
    target = fresh("llama")
    inputs = batch(random_rows((9, 4), seed=6))
    text = new_tokens(target, inputs, max_new_tokens=16)[0]
    heads = write(tmp_path / "h", own_heads(target))
    with accelerated(
        target, method="medusa", model=heads, num_speculative_tokens=6, **SHAPES[shape]
    ):
        found = [new_tokens(target, inputs, eos_token_id=[text[i]]) for i in range(1, 12, 3)]
        short = [new_tokens(target, inputs, max_new_tokens=n) for n in range(1, 6)]
    assert found == [new_tokens(target, inputs, eos_token_id=[text[i]]) for i in range(1, 12, 3)]
    assert short == [new_tokens(target, inputs, max_new_tokens=n) for n in range(1, 6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_b18_the_end_of_positions(shape, tmp_path):
    target = fresh("gpt2", max_position_embeddings=24, n_positions=24)
    heads = write(tmp_path / "h", own_heads(target))
    inputs = batch(random_rows((9, 4), seed=7))
    for new in (14, 15):
        expected = new_tokens(target, inputs, max_new_tokens=new)
        with accelerated(
            target, method="medusa", model=heads, num_speculative_tokens=8, **SHAPES[shape]
        ) as metrics:
            assert new_tokens(target, inputs, max_new_tokens=new) == expected
        assert metrics.num_draft_tokens > 0


def test_rows_of_one_prompt_with_num_return_sequences(tmp_path):
    target = fresh("llama")
    heads = write(tmp_path / "h", own_heads(target))
    inputs = batch(random_rows((5,), seed=8))
    options = dict(do_sample=True, max_new_tokens=16, num_return_sequences=3, top_k=0)
    with accelerated(target, seed=1, method="none"):
        expected = target.generate(**inputs, **options)
    with accelerated(target, seed=1, method="medusa", model=heads):
        assert torch.equal(target.generate(**inputs, **options), expected)
