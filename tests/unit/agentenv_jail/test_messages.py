"""What a confined process says is read without harm, whatever it is, and proves nothing that it could invent."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import SandboxCrashed
from agentenv.sandbox import ExecVerdict, Output, SandboxLimits, settle
from agentenv_jail.jail.messages import MAX_DATA_BYTES, REPLY
from agentenv_jail.running import Lost, receive
from agentenv_jail.session import MAX_REPLY_BYTES, StepReply

LIMITS = SandboxLimits(address_space_bytes=100 << 20)
HEADS = st.builds(
    REPLY.pack,
    st.just(1) | st.integers(0, 2**64 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 255),
    st.floats(),
    st.floats(),
    st.integers(0, 2**64 - 1),
)


@given(st.binary(max_size=200) | st.builds(bytes.__add__, HEADS, st.binary(max_size=50)))
def test_any_bytes_are_a_reply_with_possible_values_or_none(message):
    reply = StepReply.parse(message, 1)

    if reply is not None:
        assert -64 <= reply.exit <= 255
        assert 0 <= reply.duration_s < float("inf")
        assert 0 <= reply.cpu_s < float("inf")
        assert 0 <= reply.max_rss_bytes <= 1 << 50
        assert len(reply.failed) <= 300


def test_a_reply_is_for_its_own_step_and_of_bounded_length():
    message = REPLY.pack(7, 3, 0, 0.5, 0.25, 1024) + b"data"

    assert StepReply.parse(message, 7) == StepReply(3, False, 0.5, 0.25, 1024, "", b"data")
    assert StepReply.parse(message, 8) is None
    assert StepReply.parse(message[: REPLY.size - 1], 7) is None
    assert StepReply.parse(message + bytes(MAX_DATA_BYTES), 7) is None
    assert len(message[: REPLY.size]) + MAX_DATA_BYTES == MAX_REPLY_BYTES


@pytest.mark.parametrize(
    "message",
    [b"{}\n", b"[" * 60_000 + b"\n", b'{"exit": 0}\n', b"null\n", b"\xff\n", b'{"started": true}\n'],
)
def test_a_verdict_that_cannot_be_read_is_the_sandboxs_failure_and_its_memory_is_closed(message):
    memory = os.memfd_create("verdict")
    os.write(memory, message)
    os.lseek(memory, 0, os.SEEK_SET)

    with pytest.raises(SandboxCrashed, match="cannot be read"):
        receive(b"m", [memory])

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)


def test_an_empty_verdict_is_a_lost_worker():
    with pytest.raises(Lost):
        receive(b"", [])


def status(stderr: str = "", **verdict: object) -> str:
    err = Output(1000)
    err.add(stderr.encode())
    return settle(replace(ExecVerdict(), **verdict), Output(1000), err, 5.0, LIMITS).status


def test_a_signal_that_the_code_sent_to_itself_is_no_limit():
    assert status(exit=-24) == "killed"
    assert status(exit=-24, reason="cpu") == "timeout"


def test_the_word_memory_error_counts_only_with_the_memory_to_show_for_it():
    assert status("MemoryError\n", exit=1, max_rss_bytes=10 << 20) == "error"
    assert status("MemoryError\n", exit=1, max_rss_bytes=60 << 20) == "memory"
    assert status("MemoryError\n", exit=2, max_rss_bytes=60 << 20) == "error"
