"""What is measured on a GPU, and the rivals that run without one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from bench import (
    bench_ngram_lookup,
    device_cases,
    device_report,
    device_rivals,
    device_tests,
    windows,
)
from specdec_kernels import dispatch
from specdec_kernels.ops import ngram_lookup

OP = "verify_greedy"


def test_every_op_with_kernels_is_measured():
    names = {op for op, table in dispatch.IMPLEMENTATIONS.items() if {"triton", "cuda"} & {*table}}
    assert names <= set(device_cases.MEASURED)
    for op in device_cases.MEASURED:
        assert device_tests.test_files(op), op


def test_rivals_that_need_no_gpu_agree():
    for matches in ("none", "one", "many"):
        shape = {"B": 3, "S": 60, "matches": matches}
        x = bench_ngram_lookup.make(1, shape)
        got = device_rivals.torch_unfold(x, 1, 3, 10)
        wanted, num = ngram_lookup(x.tokens, x.lens, min_n=1, max_n=3, k=10)
        for b, n in enumerate(num[:, 0].tolist()):
            short = [t for t in got[b].tolist() if t >= 0]  # it does not continue periodically
            assert wanted[b, 0, : len(short)].tolist() == short and (n > 0) == bool(short)
    case = device_cases.attention_case(2, 70, 7, device_cases.SMALL_HEADS)
    x = case.make(0)
    for rival in (device_rivals.attention.sdpa_bool, device_rivals.attention.sdpa_folded):
        case.check(rival(x), case.reference(x))


def test_torch_chain_accepts_what_it_should():
    shape = {
        "B": 64, "T": 4, "V": 50, "dtype": "fp32", "rule": "token", "draft": "logits",
        "temperature": 1.0,
    }  # fmt: skip
    x = windows.make(0, shape)
    emitted = device_rivals.torch_chain(x._replace(draft_logits=x.logits))
    assert emitted.num_accepted.tolist() == [3] * 64  # the same distribution
    emitted = device_rivals.torch_chain(x)
    for tokens, accepted, drafted in zip(*emitted, x.tokens, strict=True):
        assert tokens[:accepted].equal(drafted[1 : 1 + accepted])
        assert tokens[accepted] >= 0 and (tokens[accepted + 1 :] == -1).all()


def test_losses_count_the_best_path_only():
    record = {
        "op": OP,
        "case": {"T": 1, "dtype": "bf16"},
        "rivals": {"flex": 0.9, "sdpa_bool": "x"},
    }
    records = [{**record, "path": "cuda", "ms": 1.0}, {**record, "path": "triton", "ms": 2.0}]
    (line,) = device_report.losses(records)
    assert line == "verify_greedy T=1 bf16: flex takes 0.90 of our time (cuda)"
    assert device_report.losses([{**records[0], "rivals": {"flex": 1.0}}]) == []
