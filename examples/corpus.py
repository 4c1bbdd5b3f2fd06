"""Prompts for a model to answer, so that heads and drafts can learn from its answers.

Code and prose come from the standard library and from packages under the BSD licence where they
are installed; the letters and questions are put together from the lists below. None of the text
is kept: only what a model answers, and what is learnt from that.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("networkx", "numpy", "sympy")
LEAST, MOST = 120, 900  # characters of a piece of code or prose

CODE_TASKS = (
    "Rename {name} to {other}. Print the whole code, with nothing else changed.",
    "Add a docstring to {name}. Print the whole code.",
    "Add type hints to {name} and print all of it again.",
    "Print this code with every comment removed and nothing else changed.",
    "Explain what {name} does, step by step.",
    "Write a unit test for {name}.",
    "What could go wrong in {name}? Show a corrected version.",
    "Write a shorter version of {name}.",
)
PROSE_TASKS = (
    "Summarise this text in two sentences.",
    "Quote the sentences of this text that matter most to a beginner.",
    "Quote the first two sentences of this text, then say in your own words what follows.",
    "Turn this text into a list of short points.",
    "Rewrite this text for a child of ten.",
    "Which questions does this text answer? Quote the answer to each.",
    "Correct any mistakes in this text and print all of it.",
)
PEOPLE = (
    "my sister", "my teacher, Mr. Brandt", "our landlord", "an old friend", "my aunt in Lisbon",
    "the head of the library", "a new colleague", "my neighbour, Mrs. Ito", "the mayor",
    "my grandfather", "our football coach", "a customer", "my doctor", "a former student",
)  # fmt: skip
OCCASIONS = (
    "thank them for a birthday present", "ask for two more days",
    "tell them about a hike in rain", "invite them to lunch on Sunday",
    "explain why the meeting was moved", "say sorry for the noise",
    "recommend a book about birds", "ask how the garden is doing", "describe my first week at work",
    "complain politely about a broken heater", "congratulate them on a new house",
    "tell them about a storm at sea", "ask for advice about a bicycle", "say goodbye before a move",
)  # fmt: skip
FORMS = ("letter", "short e-mail", "postcard", "message")
SUBJECTS = (
    "the tides", "bread", "a lighthouse keeper", "compound interest", "a lost umbrella", "bees",
    "the water cycle", "chess", "a train journey at night", "photosynthesis", "a village market",
    "learning the piano", "volcanoes", "a dog that waits", "the invention of paper", "sleep",
    "how a bridge stands", "a snowed-in school", "vaccines", "recursion", "the moon", "coffee",
)  # fmt: skip
WRITINGS = (
    "Write a short story about {}.", "Explain {} to someone who has never heard of it.",
    "Write five questions and answers about {}.", "Give me a plan for a talk about {}.",
    "Write a poem about {}.", "What should I know about {}?", "List ten facts about {}.",
)  # fmt: skip


def prompts(number: int, seed: int) -> Iterator[str]:
    """Of ten, four about code, three about prose, three without a text; the same for a seed."""
    rng = random.Random(seed)
    files = sources()
    for _ in range(number):
        kind = rng.random()
        if kind < 0.4:
            yield _about_code(rng, files)
        elif kind < 0.7:
            yield f"{_prose(rng, files)}\n\n{rng.choice(PROSE_TASKS)}"
        elif kind < 0.85:
            writing, person = rng.choice(FORMS), rng.choice(PEOPLE)
            first, second = rng.sample(OCCASIONS, 2)
            yield f"Write a {writing} to {person}: {first}, and {second}."
        else:
            yield rng.choice(WRITINGS).format(rng.choice(SUBJECTS))


def sources() -> list[Path]:
    """Python files without tests."""
    folders = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    others = re.compile(
        rf"/(tests?|idlelib|lib2to3|site-packages(?!/({'|'.join(PACKAGES)})))/|/test_"
    )
    return [path for path in files if not others.search(path.as_posix())]


def _about_code(rng: random.Random, files: list[Path]) -> str:
    while True:
        source, tree = _parsed(rng.choice(files))
        pieces = [
            (node.name, text)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and LEAST <= len(text := _dedented(source, node)) <= MOST
        ]
        if pieces:
            name, code = rng.choice(pieces)
            other = "_".join(rng.sample(("find", "all", "item", "load", "next", "value"), 2))
            task = rng.choice(CODE_TASKS).format(name=name, other=other)
            return f"{task}\n\n```python\n{code}\n```"


def _prose(rng: random.Random, files: list[Path]) -> str:
    """Neighbouring paragraphs of a docstring."""
    while True:
        _, tree = _parsed(rng.choice(files))
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if _has_docstring(node)]
        found = [text for text in texts if len(text) >= LEAST and ">>>" not in text]
        if found:
            paragraphs = re.split(r"\n\s*\n", rng.choice(found))
            start = rng.randrange(len(paragraphs))
            text = "\n\n".join(paragraphs[start : start + 3])[:MOST].strip()
            if len(text) >= LEAST:
                return text


def _parsed(path: Path) -> tuple[str, ast.Module]:
    try:
        source = path.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return "", ast.Module([], [])


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)


def _dedented(source: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)
