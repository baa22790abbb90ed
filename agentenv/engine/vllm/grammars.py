"""Grammars for vLLM, whose backend `guidance` of structured outputs reads ours.

The mask of a grammar is applied to the logits before the sampler sees them. So log-probabilities are those
among the tokens that the grammar left, and supports are read as those of top-k (`supports`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["grammar_of", "grammar_refused"]

_REFUSAL = re.compile(r"(?:Grammar error|Invalid grammar specification): (.*)")
_START = re.compile(r"^start\s*:", re.MULTILINE)


def grammar_of(grammar: str, stop: Sequence[int]) -> dict[str, Any]:
    """Return the part of a request that asks vLLM to sample by a grammar.

    Args:
        grammar: a grammar in Lark's form, whose first rule is `start`.
        stop: ids that may end the completion once the grammar is satisfied. By itself vLLM takes the one that
            the tokenizer names, which may be another, so they are made a part of the grammar.
    """
    if stop:
        ends = " | ".join(f"<[{token}]>" for token in stop)
        grammar = f"start: until_end ({ends})\n{_START.sub('until_end:', grammar, count=1)}"
    return {"structured_outputs": {"grammar": grammar}}


def grammar_refused(refusal: str) -> str | None:
    """Return why a server cannot follow a grammar, from its refusal; None if it refused something else."""
    found = _REFUSAL.search(refusal)
    return None if found is None else found[1]
