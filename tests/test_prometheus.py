"""Metrics as Prometheus text, under vLLM's names."""

import subprocess
import sys

import pytest

from specdec_kernels import measured
from specdec_kernels.metrics import Metrics

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from specdec_kernels.prometheus import Collector  # noqa: E402


def counted():
    counts = Metrics()
    for drafted, accepted in ((4, 4), (4, 0), (3, 2), (0, 0)):
        counts.record_row(drafted, accepted)
    counts.num_new_tokens = 10
    counts.seconds["verify"] = 1.5
    counts.record_drafter("suffix", 5, 4)
    return counts


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_names_are_those_of_vllm():
    found = samples(counted().prometheus("tiny"))
    name = ("model_name", "tiny")
    assert found["spec_decode_num_drafts_total", name] == 3
    assert found["spec_decode_num_draft_tokens_total", name] == 11
    assert found["spec_decode_num_accepted_tokens_total", name] == 6
    by_position = [
        found["spec_decode_num_accepted_tokens_per_pos_total", name, ("position", str(i))]
        for i in range(4)
    ]
    assert by_position == [2, 2, 1, 1]
    assert found["spec_decode_seconds_total", name, ("phase", "verify")] == 1.5
    assert found["spec_decode_drafter_num_accepted_tokens_total", ("drafter", "suffix"), name] == 4


def test_no_drafts_are_zeros():
    found = samples(Metrics().prometheus())
    assert found["spec_decode_num_drafts_total", ("model_name", "")] == 0
    assert all(value == 0 for value in found.values())


def test_the_planner_reads_them():
    found = measured.read(counted().prometheus())
    assert found.num_speculative_tokens == pytest.approx(11 / 3)
    assert found.tokens_per_step == pytest.approx(3.0)


def test_a_registry_reads_the_counts_of_the_moment():
    registry, counts = prometheus_client.CollectorRegistry(), counted()
    registry.register(Collector(counts))
    counts.record_row(2, 1)
    assert registry.get_sample_value("spec_decode_num_drafts_total", {"model_name": ""}) == 4


def test_without_the_package_the_error_says_what_to_install():
    code = """
import sys
sys.modules["prometheus_client"] = None
from specdec_kernels.metrics import Metrics
try:
    Metrics().prometheus()
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'specdec-kernels[metrics]'" in result.stdout, result.stderr
