"""Masks that keep a completion inside a grammar, by the package llguidance.

1. The mask of a token allows what the grammar allows next, and the stop tokens once the grammar is satisfied.
2. Control tokens are no text: a grammar allows one only where it names its id, as in `<[151657]>`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.render.control import ControlSet
from agentenv.render.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammars", "InGrammar"]


class Grammars:
    """Begins completions that follow a grammar, for one tokenizer.

    Args:
        tokenizer: the tokenizer of the model.
        vocab_size: number of logits of the model, which may exceed the tokenizer's tokens.
        end: an id that ends completions, which llguidance must know of one.

    Raises:
        DependencyMissing: llguidance is not installed.
        UsageError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: object, vocab_size: int, end: int) -> None:
        DependencyMissing.require("llguidance", extra="grammar", purpose="sampling by a grammar")
        from llguidance import LLTokenizer

        chat = ChatTokenizer.of(tokenizer)
        self._vocab_size = vocab_size
        self._end = end
        size = max(vocab_size, chat.id_limit)
        try:
            self._tokenizer = LLTokenizer(_as_json(chat), n_vocab=size, eos_token=end)
        except ValueError as error:
            raise UsageError(f"{chat.name} cannot be used for sampling by a grammar: {error}") from error

    def begin(self, grammar: str, stop: frozenset[int]) -> InGrammar:
        """Return what follows one completion.

        Args:
            grammar: a grammar in Lark's form, as llguidance reads it.
            stop: ids that may end the completion once the grammar is satisfied.

        Raises:
            UsageError: The grammar cannot be followed.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            told = matcher.get_error().partition("\n")[0]
            raise UsageError(f"the grammar of the completion cannot be followed: {told}")
        return InGrammar(matcher, self._vocab_size, self._end, stop)


class InGrammar:
    """A completion that follows a grammar, while it is sampled."""

    __slots__ = ("_end", "_matcher", "_stop", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int, end: int, stop: frozenset[int]) -> None:
        self._matcher = matcher
        self._end = end
        self._vocab_size = vocab_size
        self._stop = sorted(stop)

    @property
    def problem(self) -> str:
        """Why the grammar can no longer be followed; empty while it can."""
        return self._matcher.get_error().partition("\n")[0]

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next, as one truth value for each token of the model."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        # Which tokens may end a completion differs between requests, and llguidance knows of one.
        allowed[self._end] = 0
        if self._matcher.is_accepting():
            allowed[self._stop] = 1
        return torch.from_numpy(allowed.astype(bool))

    def take(self, token: int) -> None:
        """Go on after a sampled token."""
        if token not in self._stop:
            self._matcher.consume_token(token)


def _as_json(tokenizer: ChatTokenizer) -> str:
    """Return a tokenizer as JSON, in which all control tokens are special."""
    state: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    control = set(ControlSet.of(tokenizer, tokenizer.chat_template or "").strings.values())
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["id"] in control
    return json.dumps(state)
