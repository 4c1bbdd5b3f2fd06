"""Options of a command line: a list of words, or what one would type into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specdec_kernels.spellings.reading import Key, switch, unknown


def words(args: str | Iterable[str], who: str) -> list[str]:
    """The words of a command line; a shell string may go over several lines, with backslashes."""
    if isinstance(args, str):
        try:
            return shlex.split(args.replace("\\\n", " "))
        except ValueError as error:
            raise ValueError(f"{who}: expected a command line, got {args!r}: {error}") from None
    found: list[Any] = list(args) if isinstance(args, Iterable) else [args]
    for word in found:
        if not isinstance(word, str):
            raise TypeError(
                f"{who}: expected a command line or its words, got {type(word).__name__} {word!r}"
            )
    return found


def options(
    args: list[str],
    keys: Mapping[str, Key],
    who: str,
    *,
    claims: Callable[[str], bool],
    abbreviate: bool = False,
) -> list[tuple[str, Any]]:
    """The options of `keys` in `args`, in their order, as (name, text or True or False).

    Other words are skipped, unless `claims` takes them for one of ours: ValueError names the
    nearest. Both "--name value" and "--name=value" are read, "_" for "-" too, and with `abbreviate`
    any beginning that fits one option only.
    """
    names = {spelled: name for name, key in keys.items() for spelled in (name, *key.names)}
    found: list[tuple[str, Any]] = []
    rest = iter(args)
    for word in rest:
        flag, equals, value = word, "", ""
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
        name = _find(flag, names, abbreviate and claims(flag))
        if name is None:
            if claims(flag):
                raise unknown(who, flag, names)
        elif keys[name].parse is switch:
            if equals:
                raise ValueError(f"{who}: {flag}: expected no value, got {value!r}")
            found.append((name, not flag.startswith("--no-")))
        else:
            if not equals:
                value = next(rest, "--")
                if value.startswith("--"):
                    raise ValueError(f"{who}: {flag}: expected a value, got none")
            found.append((name, value))
    return found


def _find(flag: str, names: Mapping[str, str], abbreviate: bool) -> str | None:
    if flag in names or not abbreviate:
        return names.get(flag)
    begun = {name for spelled, name in names.items() if spelled.startswith(flag)}
    return begun.pop() if len(begun) == 1 else None
