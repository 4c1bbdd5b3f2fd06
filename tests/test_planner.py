"""The arithmetic of pay-off, what drafts cost in memory, and `specdec plan`."""

import json
import math

import pytest

from specdec_kernels import measured, memory, planner
from specdec_kernels.cli import main
from specdec_kernels.metrics import Metrics


def plan_json(capsys, *argv):
    assert main(["plan", *argv, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rate", "tokens", "ratio"), [(0.7, 2.77, 1.73), (0.4, 1.65, 1.03), (0.3, 1.43, 0.89)]
)
def test_the_arithmetic(capsys, rate, tokens, ratio):
    options = ["--acceptance-rate", str(rate), "--num-speculative-tokens", "4", "--draft-cost"]
    found = plan_json(capsys, *options, "0.15")
    assert round(found["expected_tokens"], 2) == tokens
    assert found["iteration_cost"] == pytest.approx(1.6)
    assert round(found["speedup"], 2) == ratio


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.73, 0.999, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 17])
def test_the_sum_is_the_closed_form(rate, k):
    closed = k + 1 if rate == 1.0 else (1 - rate ** (k + 1)) / (1 - rate)
    assert planner.expected_tokens(rate, k) == pytest.approx(closed)
    assert planner.acceptance_rate_of(closed, k) == pytest.approx(rate if k else 0.0, abs=1e-12)


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.95])
def test_best_k_and_break_even(rate, cost):
    found = planner.plan(rate, 4, cost, longest=40)
    ratios = [planner.expected_tokens(rate, k) / (1 + k * cost) for k in range(41)]
    assert found.best_speedup == max(ratios)
    assert found.best_k == ratios.index(max(ratios))
    even = found.break_even_acceptance_rate
    assert planner.speedup(even, 4, cost) == pytest.approx(1.0)
    if found.break_even_draft_cost:
        assert planner.speedup(rate, 4, found.break_even_draft_cost) == pytest.approx(1.0)
    assert planner.plan(rate, 4, 1.1).break_even_acceptance_rate is None
    assert planner.plan(rate, 0, cost).break_even_acceptance_rate is None


def test_a_slot_costs_as_much_as_a_draft():
    both = planner.plan(0.6, 5, 0.05, 0.04)
    assert both.iteration_cost == pytest.approx(1.45)
    alone = planner.plan(0.6, 5, 0.09)
    assert (both.speedup, both.best_k) == (alone.speedup, alone.best_k)
    assert both.break_even_draft_cost == pytest.approx(alone.break_even_draft_cost - 0.04)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ((0.8, 4, 0.05), "lengthen"),
        ((0.7, 4, 0.15), "keep"),
        ((0.5, 8, 0.1), "shorten"),
        ((0.3, 1, 0.15), "better draft"),
        ((0.1, 4, 0.2), "off"),
        ((0.9, 4, 1.0), "off"),
    ],
)
def test_advice(setting, word):
    assert planner.advice(planner.plan(*setting)).startswith(word + ":")


def test_wrong_numbers_are_named():
    for arguments in ((1.1, 4, 0.1), (-0.1, 4, 0.1), (math.nan, 4, 0.1)):
        with pytest.raises(ValueError, match="expected acceptance_rate from 0 to 1"):
            planner.plan(*arguments)
    with pytest.raises(ValueError, match="num_speculative_tokens of at least 0, got -1"):
        planner.plan(0.5, -1, 0.1)
    with pytest.raises(ValueError, match="draft_cost of at least 0 and finite, got nan"):
        planner.plan(0.5, 1, math.nan)


# ---- memory

QWEN_LIKE = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "torch_dtype": "bfloat16",
}


def test_a_gigabyte_of_draft_weights():
    kv = memory.kv_size(QWEN_LIKE)
    assert kv.per_token == 2 * 36 * 8 * 128 * 2
    for size, tokens in ((10**9, 6782), (2**30, 7282)):
        found = memory.displaced(size, kv)
        assert round(found["tokens_lost"]) == tokens
        assert found["conversations_lost"] == pytest.approx(tokens / 4096, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "per_token", "long_conversation"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768 * 2, None),
        ({**QWEN_LIKE, "torch_dtype": "float32"}, 2 * 36 * 8 * 128 * 4, None),
        ({"text_config": QWEN_LIKE, "hidden_size": 1}, 2 * 36 * 8 * 128 * 2, None),
        ({**QWEN_LIKE, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 36 * 576 * 2, None),
        (
            {
                **QWEN_LIKE,
                "sliding_window": 512,
                "layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 6,
            },
            2 * 36 * 8 * 128 * 2,
            (6 * 4096 + 30 * 512) * 2 * 8 * 128 * 2,
        ),
        (
            {**QWEN_LIKE, "layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9},
            2 * 9 * 8 * 128 * 2,
            None,
        ),
    ],
)
def test_bytes_of_a_token(config, per_token, long_conversation):
    kv = memory.kv_size(config)
    assert kv.per_token == per_token
    assert kv.of(4096) == (long_conversation or 4096 * per_token)


def test_a_config_that_says_too_little():
    with pytest.raises(ValueError, match="expected num_attention_heads or n_head"):
        memory.kv_size({"num_hidden_layers": 2})
    with pytest.raises(ValueError, match=r"expected a dtype of float64.*got 'int3'"):
        memory.kv_size(QWEN_LIKE, "int3")


def checkpoint(folder, config=QWEN_LIKE, weights=2_000_000):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(weights // 2))
    (folder / "model-00002-of-00002.safetensors").write_bytes(bytes(weights // 2))
    return str(folder)


def test_memory_by_the_command(capsys, tmp_path):
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft")
    found = plan_json(capsys, "--model", target, "--draft", draft)
    assert "speedup" not in found
    assert found["memory"]["draft_bytes"] == 2_000_000
    found = plan_json(
        capsys, "--model", target, "--draft-bytes", "1GiB", "--kv-dtype", "float8_e4m3fn"
    )
    assert round(found["memory"]["tokens_lost"]) == 14564
    assert main(["plan", "--model", target, "--draft-bytes", "1.5GB"]) == 0
    assert "conversations of 4,096 tokens" in capsys.readouterr().out


# ---- measured numbers


def snapshot(steps=40, k=4, accepted=2, draft=2.0, verify=10.0, undrafted=10):
    counts = Metrics()
    for _ in range(steps):
        counts.record_row(k, accepted)
    for _ in range(undrafted):
        counts.record_row(0, 0)
    counts.num_steps = steps + undrafted
    counts.seconds.update(draft=draft, verify=verify)
    return counts.snapshot()


@pytest.mark.parametrize("wrapped", [False, True])
def test_plan_from_metrics(capsys, tmp_path, wrapped):
    file = tmp_path / "metrics.json"
    taken = snapshot()
    file.write_text(json.dumps({"text": "x", "metrics": taken} if wrapped else taken))
    found = plan_json(capsys, "--metrics", str(file))
    assert found["num_speculative_tokens"] == 4
    assert found["expected_tokens"] == pytest.approx(3.0)
    # 40 drafts of 4 tokens took 2 s, a forward 0.2 s
    assert found["draft_cost"] == pytest.approx(2.0 / 160 / 0.2)
    cheaper = plan_json(capsys, "--metrics", str(file), "--draft-cost", "0.01")
    assert cheaper["draft_cost"] == 0.01
    assert cheaper["acceptance_rate"] == found["acceptance_rate"]


def test_plan_from_prometheus_text(tmp_path, capsys):
    text = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 30.0
vllm:spec_decode_num_drafts_total{engine="1"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 160.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 36.0
"""
    found = measured.read(text)
    assert (found.num_speculative_tokens, found.tokens_per_step) == (4.0, 3.0)
    assert found.draft_cost is None
    file = tmp_path / "metrics.txt"
    file.write_text(text)
    assert main(["plan", "--metrics", str(file)]) == 2
    assert "expected --draft-cost" in capsys.readouterr().err
    assert plan_json(capsys, "--metrics", str(file), "--draft-cost", "0.1")["speedup"] > 1


def test_a_mean_length_between_two():
    found = measured.read(
        json.dumps(
            snapshot(k=3, steps=1)
            | {"num_draft_tokens": 7}
            | {"num_drafts": 2, "num_accepted_tokens": 4}
        )
    )
    assert found.num_speculative_tokens == 3.5
    a = found.acceptance_rate
    mean = (planner.expected_tokens(a, 3) + planner.expected_tokens(a, 4)) / 2
    assert mean == pytest.approx(3.0)


# ---- mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected --acceptance-rate, --num-speculative-tokens, --draft-cost, or --metrics"),
        (["--acceptance-rate", "0.5"], "expected --num-speculative-tokens, --draft-cost"),
        (["--acceptance-rate", "1.5"], "expected a number of at least 0 and at most 1"),
        (["--draft-bytes", "5 apples"], "expected a size such as 500MB"),
        (["--draft", "x"], "expected --model with --draft"),
        (["--model", "nowhere", "--draft-bytes", "1GB"], "cannot read nowhere/config.json"),
        (["--metrics", "nowhere"], "cannot read nowhere"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, argv, message):
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("{}", "expected an object with num_accepted_tokens"),
        ("nothing here", "expected JSON metrics or Prometheus text"),
        (json.dumps(snapshot(steps=0)), "no drafts were counted"),
    ],
)
def test_unusable_metrics(capsys, tmp_path, content, message):
    (tmp_path / "m").write_text(content)
    assert main(["plan", "--metrics", str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    options = ["--acceptance-rate", "0.6", "--num-speculative-tokens", "3", "--draft-cost", "0.1"]
    assert main(["plan", *options, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
