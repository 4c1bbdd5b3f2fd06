"""What a suite of checks found."""

from __future__ import annotations

from typing import NamedTuple

from specdec_kernels.testing.statistics import FALSE_ALARM


class Check(NamedTuple):
    """pvalue: the chance of a sound sampler to look as bad or worse; without chance 1 or 0."""

    name: str
    pvalue: float
    detail: str = ""
    by_chance: bool = True

    @staticmethod
    def of(name: str, passed: bool, detail: str = "") -> Check:
        """A check that a sound sampler never fails."""
        return Check(name, float(passed), detail, by_chance=False)


class Report(NamedTuple):
    """A sound sampler fails with probability at most `false_alarm`, all checks together."""

    checks: tuple[Check, ...]
    false_alarm: float = FALSE_ALARM

    @property
    def limit(self) -> float:
        """The p-value from which on a check has passed."""
        return self.false_alarm / max(1, sum(check.by_chance for check in self.checks))

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.pvalue < self.limit]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def smallest_pvalue(self) -> float:
        return min((check.pvalue for check in self.checks), default=1.0)

    def __str__(self) -> str:
        width = max([len(check.name) for check in self.checks], default=0)
        lines = [
            f"{'FAIL' if check in self.failures else 'ok  '}  {check.name:<{width}}  "
            f"{f'p {check.pvalue:8.2g}' if check.by_chance else ' ' * 10}  {check.detail}".rstrip()
            for check in self.checks
        ]
        verdict = f"{len(self.failures)} of {len(self.checks)} checks failed"
        return "\n".join([*lines, f"{verdict} (a check fails below p = {self.limit:.1g})"])
