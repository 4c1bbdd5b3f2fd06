"""Key: what becomes of one option of another engine. Reading: what became of those given."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels import notices
from specdec_kernels.config_checks import methods_of

# Methods of other engines that are not here, or not yet; any other unknown one is a typing error.
FOREIGN_METHODS = (
    "suffix",
    "draft_model",
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "mtp",
    "dflash",
    "dspark",
    "uno",
    "extract_hidden_states",
    "custom_class",
)


def as_given(value: Any) -> Any:
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    return value


def whole(value: Any) -> int:
    """An integer, or text that spells one; ValueError or TypeError says what was expected."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError) as error:
        raise type(error)("an integer") from None


def number(value: Any) -> float:
    """A float, or text that spells one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError("a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError("a number") from None


def switch(value: Any) -> bool:
    """True or False; on a command line, an option that takes no value."""
    if not isinstance(value, bool):
        raise TypeError("True or False")
    return value


@dataclass(frozen=True)
class Key:
    """One option of another engine.

    kind: "mapped": it becomes settings of ours. "harmless": it cannot change what is generated (a
        device, a format, a detail of drafting): a warning says that it has no effect. "refused": it
        would change the output, or names something that is not here: ValueError. The engine's own
        default is no news under any of them.
    what: our setting, or why it is harmless or refused.
    default: the engine's.
    parse: from what was given, text included where the engine has a command line.
    names: further names on a command line.
    """

    kind: str
    what: str
    default: Any = None
    parse: Callable[[Any], Any] = as_given
    names: tuple[str, ...] = ()


def mapped(what: str, *args: Any, **more: Any) -> Key:
    return Key("mapped", what, *args, **more)


def harmless(what: str, *args: Any, **more: Any) -> Key:
    return Key("harmless", what, *args, **more)


def refused(what: str, *args: Any, **more: Any) -> Key:
    return Key("refused", what, *args, **more)


def unknown(who: str, name: Any, known: Iterable[str], kind: str = "option") -> ValueError:
    """The error for a name that is not known: it names the nearest one."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)[0]
    return ValueError(f"{who}: unknown {kind} {name!r}; the nearest known one is {near!r}")


@dataclass
class Reading:
    """Settings in our names.

    who: the function that reads, for messages.
    settings: what was asked for: it must be possible here.
    defaults: what the other engine does unless told otherwise; taken where this version has the
        field and `settings` does not say.
    idle: options without effect, in words.
    """

    who: str
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)

    def sort(self, keys: Mapping[str, Key], given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of mapped keys that differ from the engine's default; the others end here."""
        values = {}
        for name, raw in given.items():
            key = keys[name]
            value = None if raw is None else self.parse(name, key, raw)
            if value is None or value == key.default:
                continue
            if key.kind == "mapped":
                values[name] = value
            elif key.kind == "harmless":
                self.has_no_effect(name, value, key.what)
            else:
                raise ValueError(f"{self.who}: {name}={value!r} is refused: {key.what}")
        return values

    def parse(self, name: str, key: Key, raw: Any) -> Any:
        try:
            return key.parse(raw)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.who}: {name}: expected {error}, got {raw!r}") from None

    def has_no_effect(self, name: str, value: Any, why: str) -> None:
        self.idle.append(f"{name}={value!r} ({why})")

    def set(self, name: str, value: Any, source: str) -> None:
        """One setting; two sources that disagree are an error."""
        before = self.settings.setdefault(name, value)
        if before is not value and before != value:
            raise ValueError(f"{self.who}: {source} sets {name} to {value!r}, but it is {before!r}")

    def resolve(self, fields: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
        """Keyword arguments for a SpeculativeConfig with these fields and methods.

        Raises ValueError for a method or an option that this version does not have; warns once of
        all that has no effect.
        """
        settings = {k: v for k, v in self.defaults.items() if k in fields} | self.settings
        method = settings.get("method")
        for part in methods_of(method) if isinstance(method, str) else ():
            has = ", ".join(methods)
            if part not in methods and part in FOREIGN_METHODS:
                raise ValueError(f"{self.who}: this version has no method {part!r}; it has {has}")
        for name in settings:
            if name not in fields:
                raise ValueError(f"{self.who}: this version has no option {name!r}")
        if self.idle:
            notices.warn(f"{self.who}: no effect here: {'; '.join(self.idle)}")
        return settings
