"""SIGTERM in a process that a shell started in the background, where Ctrl-C is ignored."""

from __future__ import annotations

import asyncio
import signal

import pytest

from agentenv.core.interrupts import ctrl_c
from agentenv.core.loops import run_blocking


@pytest.fixture(autouse=True)
def _in_the_background():
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, frame: ctrl_c()(signal.SIGINT, frame))
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_it_cancels_what_runs_and_is_not_raised_in_the_midst_of_other_code():
    swallowed, seen = [], []

    async def main():
        try:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # is ignored still
        except BaseException as error:  # noqa: BLE001 - so the call of a tool takes it for the tool's failure
            swallowed.append(error)
        seen.append(signal.getsignal(signal.SIGINT))
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 10)
        finally:
            seen.append("closed")

    with pytest.raises(KeyboardInterrupt):
        run_blocking(main())

    assert (swallowed, seen) == ([], [signal.SIG_IGN, "closed"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_second_one_is_raised_at_once_and_so_is_one_that_nothing_hears():
    async def main():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_blocking(main())
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
