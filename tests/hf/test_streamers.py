"""What arrives at a streamer: every kept token once, nothing behind a stop, one end (D14)."""

import threading

import pytest
import torch
from tiny import (
    Recorder,
    accelerated,
    batch,
    char_tokenizer,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    random_rows,
    use_drafter,
)
from transformers import StoppingCriteria, TextIteratorStreamer, TextStreamer

import specdec_kernels as sdk


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


@pytest.fixture(scope="module")
def inputs(model):
    return batch(lookup_rows(model, lens=(9,)))


def stream(model, inputs, **options):
    streamer = Recorder()
    new_tokens(model, inputs, streamer=streamer, **options)
    return streamer


def test_recorded_tokens_equal_plain(model, inputs):
    expected = stream(model, inputs)
    with accelerated(model, num_speculative_tokens=8) as metrics:
        got = stream(model, inputs)
    assert metrics.num_accepted_tokens > 8
    assert got.puts == expected.puts and got.ends == 1


@pytest.mark.parametrize("pos", [0, 1, 4, 5, 6, 11])
def test_nothing_behind_the_end_of_a_block(model, inputs, pos, monkeypatch):
    """D01: an EOS accepted in the middle of a block ends the stream there."""
    prompts = inputs["input_ids"].tolist()
    text = new_tokens(model, inputs, max_new_tokens=20)
    eos = text[0][pos]
    use_drafter(monkeypatch, lambda b, seen: [future_of(prompts, text)(b, seen)[:6]])
    with accelerated(model, num_speculative_tokens=6):
        got = stream(model, inputs, max_new_tokens=20, eos_token_id=eos)
    kept = text[0][: text[0].index(eos) + 1]
    assert got.puts == [prompts[0], *[[t] for t in kept]] and got.ends == 1


@pytest.mark.parametrize("new", [1, 2, 3])
def test_short_runs(inputs, new):
    """The first tokens are held until the model has proved itself, then they must come out."""
    model = fresh("phi3")
    expected = stream(model, inputs, max_new_tokens=new)
    with accelerated(model):
        assert stream(model, inputs, max_new_tokens=new).puts == expected.puts


def test_text_streamers(model, inputs, capsys):
    tokenizer = char_tokenizer()
    text = tokenizer.decode(new_tokens(model, inputs)[0])
    with accelerated(model, num_speculative_tokens=8):
        new_tokens(model, inputs, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out == text + "\n"
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        options = dict(**inputs, streamer=streamer, max_new_tokens=48, do_sample=False)
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        assert "".join(streamer) == text
        thread.join()


class Raises(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.at:
            raise KeyError("from the criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("after", [1, 2, 9])
def test_one_end_on_exception(inputs, after):
    """A reader of a TextIteratorStreamer would otherwise wait for ever."""
    model = fresh("phi3")
    criterion = Raises()
    criterion.at = inputs["input_ids"].shape[1] + after
    expected = new_tokens(model, inputs)[0][:after]
    streamer = Recorder()
    with accelerated(model, num_speculative_tokens=8), pytest.raises(KeyError):
        new_tokens(model, inputs, streamer=streamer, stopping_criteria=[criterion])
    assert streamer.ends == 1
    assert [t for put in streamer.puts[1:] for t in put] == expected


def test_accepted_tokens_can_be_told_apart(model, inputs):
    class Colours(Recorder):
        def __init__(self):
            super().__init__()
            self.accepted = []

        def put_accepted(self, value):
            self.put(value)
            self.accepted.append(len(self.puts) - 1)

    expected = stream(model, inputs)
    streamer = Colours()
    with accelerated(model, num_speculative_tokens=8) as metrics:
        new_tokens(model, inputs, streamer=streamer)
    assert streamer.puts == expected.puts
    assert len(streamer.accepted) == metrics.num_accepted_tokens


def test_streams_of_a_model_that_turns_out_unsupported(inputs):
    """The plain run that takes over gets the streamer, and the caller every token once."""
    model = fresh("phi3")
    expected = stream(model, inputs)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "unheard_of": torch.ones(1)}),
            with_kwargs=True,
        )
    sdk.patch(model)
    with pytest.warns(UserWarning, match="passes unheard_of to its attention"):
        got = stream(model, inputs)
    assert got.puts == expected.puts and got.ends == 1
    sdk.unpatch(model)


def test_more_than_one_row_is_left_to_transformers(model):
    inputs = batch(random_rows((5, 5)))
    sdk.patch(model)
    with pytest.warns(UserWarning, match="streamer with more than one row"):
        assert len(stream_all(model, inputs)) == 5
    sdk.unpatch(model)


def stream_all(model, inputs):
    class Any(Recorder):
        def put(self, value):
            self.puts.append(value)

    streamer = Any()
    new_tokens(model, inputs, streamer=streamer, max_new_tokens=4)
    return streamer.puts
