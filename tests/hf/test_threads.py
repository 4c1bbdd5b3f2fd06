"""Several threads at once: each gets what it would have got alone."""

import threading

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens, tiny
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_kernels as sdk


def together(*jobs):
    """Runs the jobs in threads, three times each, all starting at once; their results in order."""
    start = threading.Barrier(len(jobs))
    results = [[] for _ in jobs]

    def run(i):
        start.wait()
        try:
            for _ in range(3):
                results[i].append(jobs[i]())
        except BaseException as error:
            results[i].append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def is_as_it_was(model):
    return model.config._attn_implementation == "sdpa" and not any(
        "forward" in vars(module) for module in model.modules()
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_two_threads_on_one_patched_model(name):
    model = fresh(name)
    rows = lookup_rows(model)
    one, two = batch(rows[:1]), batch(rows)
    expected = [new_tokens(model, one), new_tokens(model, two)]
    with accelerated(model, num_speculative_tokens=6) as metrics:
        results = together(lambda: new_tokens(model, one), lambda: new_tokens(model, two))
    assert results == [[expected[0]] * 3, [expected[1]] * 3]
    assert metrics.num_new_tokens == 3 * 4 * 48
    assert is_as_it_was(model)


def test_sampling_in_two_threads():
    model = fresh("llama")
    inputs = batch(lookup_rows(model))

    def sample():
        return new_tokens(model, inputs, do_sample=True, temperature=1.3)

    with accelerated(model, seed=3):
        expected = sample()
        assert together(sample, sample) == [[expected] * 3] * 2


def test_patched_and_plain_side_by_side():
    """Also where both models hold the same config object."""
    config = LlamaConfig(**{**tiny("llama").config.to_dict(), "architectures": None})
    first, second = (LlamaForCausalLM(config).eval() for _ in range(2))
    first.load_state_dict(tiny("llama").state_dict())
    inputs = batch(lookup_rows(tiny("llama")))
    expected = [new_tokens(first, inputs), new_tokens(second, inputs)]
    jobs = [lambda: new_tokens(first, inputs), lambda: new_tokens(second, inputs)]
    with accelerated(first, num_speculative_tokens=6):
        assert together(*jobs) == [[e] * 3 for e in expected]
        with accelerated(second):
            assert together(*jobs) == [[e] * 3 for e in expected]
    assert is_as_it_was(first) and is_as_it_was(second)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_plain_forward_of_the_same_model(implementation):
    model = fresh("llama", attn_implementation=implementation)
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)

    @torch.no_grad()
    def forwards():
        return [model(**inputs).logits for _ in range(20)]

    alone = forwards()[0]
    with accelerated(model, num_speculative_tokens=6):
        texts, logits = together(lambda: new_tokens(model, inputs), forwards)
    assert texts == [expected] * 3
    assert all(torch.equal(each, alone) for run in logits for each in run)


def test_patching_again_while_another_thread_generates():
    model = fresh("llama")
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)

    def again():
        for size in range(1, 20):
            with sdk.patched(model, num_speculative_tokens=size):
                if size % 6 == 0:
                    assert new_tokens(model, inputs) == expected

    with accelerated(model):
        texts, nothing = together(lambda: new_tokens(model, inputs), again)
    assert texts == [expected] * 3 and nothing == [None] * 3
    assert is_as_it_was(model)
