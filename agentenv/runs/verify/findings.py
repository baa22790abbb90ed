"""What the checks of stored episodes found, and what they looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentenv.core.visible import visible

__all__ = ["CHECKS", "Finding", "Verification", "summary_of"]

CHECKS = ("record", "digest", "parse", "prompt", "observation", "tokenisation", "drift", "logprobs")


_NOUNS = {"record": "episodes", "digest": "episodes", "logprobs": "tokens", "drift": "sequences"}
"""What a check counts, where it is not spans."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a check found in an episode."""

    check: str
    """Name of the check."""
    turn: int | None
    """Index of the turn; None if the finding is about the whole episode."""
    detail: str
    wrong: bool = True
    """True if parts of the record disagree; False for what is reported and may be so."""
    episode: str = ""
    """The episode as `task/member`."""

    def __str__(self) -> str:
        where = self.episode + ("" if self.turn is None else f" turn {self.turn}")
        return visible(f"{where}: {self.check}: {self.detail}")


@dataclass(slots=True)
class Verification:
    """What the checks of a run or of an episode looked at, and what they found."""

    findings: list[Finding] = field(default_factory=list[Finding])
    checked: Counter[str] = field(default_factory=Counter[str])
    """How much each check looked at: episodes for `record` and `digest`, tokens for `logprobs`, else spans or
    sequences."""
    num_episodes: int = 0
    difference: float = 0.0
    """Sum of the absolute differences between recorded and recomputed log-probabilities."""
    largest_difference: float = 0.0

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """Findings in which parts of the record disagree."""
        return tuple(finding for finding in self.findings if finding.wrong)

    def of(self, check: str) -> tuple[Finding, ...]:
        """Return the findings of one check."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def add(self, check: str, turn: int | None, detail: str, *, wrong: bool = True) -> None:
        """Add a finding."""
        self.findings.append(Finding(check, turn, detail, wrong))


def summary_of(checks: Verification) -> Mapping[str, str]:
    """Return one sentence for each check that looked at something."""
    texts: dict[str, str] = {}
    for check in CHECKS:
        count = checks.checked[check]
        findings = checks.of(check)
        if not count and not findings:
            continue
        noun = _NOUNS.get(check, "spans")
        if check == "tokenisation":
            texts[check] = f"{count} sampled spans, {len(findings)} encode to other ids than were sampled"
        elif check == "logprobs":
            mean = checks.difference / count if count else float("nan")
            largest = checks.largest_difference
            texts[check] = f"{count} tokens, mean difference {mean:.2g}, largest {largest:.2g}"
        else:
            differ = f"{len(findings)} differences" if findings else "all agree"
            texts[check] = f"{count} {noun}, {differ}"
    return texts
