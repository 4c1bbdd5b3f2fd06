"""python -m bench plot: what it draws and how it says that it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from bench import __main__ as cli
from bench import plot


def attention_record(size: int, **changes) -> dict:
    shape = {"T": size, "ctx": 50, "B": 1, "dtype": "bf16", "Hq": 9, "Hkv": 3, "D": 64}
    return {
        "op": "tree_attention", "case": shape | changes, "backend": "cpu", "threads": 1,
        "ms": 0.5, "roof_ms": 0.25, "rivals": {"sdpa_bool": 1.0}, "machine": {"cpu": "a CPU"},
    }  # fmt: skip


def test_plot_groups_by_shape_and_draws_the_roof():
    records = [
        attention_record(8),
        {"op": "sample"},
        attention_record(1),
        attention_record(1, ctx=9),
    ]
    shapes = plot.panels(records)
    assert list(shapes) == [(9, 3, 64, "bf16", 1, 50)]
    curves = plot.curves(next(iter(shapes.values())))
    assert curves["ours (cpu)"] == ([1, 8], [0.5, 0.5])
    assert curves["sdpa_bool"] == ([1, 8], [1.0, 1.0]) and curves["roof"] == ([1, 8], [0.25, 0.25])


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    source, target = tmp_path / "in.json", tmp_path / "out.png"
    source.write_text("".join(json.dumps(attention_record(t)) + "\n" for t in (1, 8)))
    assert cli.main(["plot", str(source), "-o", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_plot_names_what_is_missing(tmp_path, capsys, monkeypatch):
    source = tmp_path / "in.json"
    for content, message in (
        ("", "nothing to draw"),
        ("no json", "does not hold one JSON record a line"),
        ("".join(json.dumps(attention_record(t)) + "\n" for t in (1, 8)), "needs matplotlib"),
    ):
        source.write_text(content)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert cli.main(["plot", str(source), "-o", str(tmp_path / "out.png")]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["plot", str(tmp_path / "none.json"), "-o", "x.png"]) == 2
    assert "cannot read" in capsys.readouterr().err
