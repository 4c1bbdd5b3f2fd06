"""What the adaptive choice has learnt, saved and taken up by the next patch."""

import json

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens

import specdec_kernels as sdk
from specdec_kernels.hf.patch import _engines


@pytest.fixture(scope="module")
def model():
    return fresh("llama")


@pytest.fixture(scope="module")
def inputs(model):
    return batch(lookup_rows(model))


@pytest.fixture
def saved(model, inputs, tmp_path):
    file = tmp_path / "profile.json"
    with accelerated(model):
        new_tokens(model, inputs)
        sdk.save_profile(model, file)
    return file


def state_of(model):
    return _engines[model].learnt().state()


def test_a_patched_model_begins_with_what_was_learnt(model, inputs, saved):
    entry = json.loads(saved.read_text())["entries"][0]
    assert entry["costs"] and entry["acceptance"]
    with accelerated(model, profile=saved):
        found = state_of(model)
        assert found["costs"] == entry["costs"] and found["acceptance"] == entry["acceptance"]
        new_tokens(model, inputs)
        assert state_of(model) != found
    with accelerated(model):
        assert state_of(model)["costs"] == []


def test_the_text_is_that_of_plain(model, inputs, saved):
    expected = new_tokens(model, inputs)
    with accelerated(model, profile=str(saved)) as metrics:
        assert new_tokens(model, inputs) == expected
        assert metrics.num_accepted_tokens > 0


def test_a_file_holds_several_models_methods_and_thread_counts(model, inputs, saved):
    other, threads = fresh("gpt2"), torch.get_num_threads()
    with accelerated(other):
        new_tokens(other, inputs)
        sdk.save_profile(other, saved)
    with accelerated(model, method="suffix", profile=saved):
        assert state_of(model)["costs"] == []
        new_tokens(model, inputs)
        sdk.save_profile(model, saved)
        sdk.save_profile(model, saved)
    entries = json.loads(saved.read_text())["entries"]
    assert len(entries) == 3
    for patched, options in ((model, {}), (other, {}), (model, {"method": "suffix"})):
        with accelerated(patched, profile=saved, **options):
            assert state_of(patched)["costs"]
    try:
        torch.set_num_threads(threads + 1)
        with accelerated(model, profile=saved):
            assert state_of(model)["costs"] == []
    finally:
        torch.set_num_threads(threads)


def test_a_file_that_does_not_exist_is_none(model, inputs, tmp_path):
    with accelerated(model, profile=tmp_path / "none.json"):
        assert state_of(model)["costs"] == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "{" + text, "is no profile: "),
        (lambda text: "[]", "is no profile of this version"),
        (lambda text: text.replace('"specdec_profile": 1', '"specdec_profile": 99'), "of this ver"),
        (lambda text: text.replace('"costs": [[', '"costs": [["x", '), "is damaged"),
        (lambda text: text.replace('"costs"', '"cost"'), "is damaged"),
        (
            lambda text: text.replace('"acceptance": [[', '"acceptance": [[9, 5.0, 2.0], ['),
            "is dam",
        ),
        (lambda text: '{"specdec_profile": 1, "entries": [3]}', "expected a list of entries"),
    ],
)
def test_a_damaged_file_is_refused_whole(model, saved, damage, message):
    saved.write_text(damage(saved.read_text()))
    before = saved.read_text()
    with pytest.raises(ValueError, match=message), accelerated(model, profile=saved):
        pass
    assert model not in _engines
    assert saved.read_text() == before


def test_nothing_else_is_overwritten(model, inputs, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("not a profile")
    with accelerated(model), pytest.raises(ValueError, match="is no profile"):
        new_tokens(model, inputs)
        sdk.save_profile(model, file)
    assert file.read_text() == "not a profile" and len(list(tmp_path.iterdir())) == 1


def test_an_unpatched_model_has_none(model, tmp_path):
    with pytest.raises(ValueError, match="save_profile: expected a patched model"):
        sdk.save_profile(model, tmp_path / "p")
