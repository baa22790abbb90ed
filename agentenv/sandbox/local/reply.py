"""The reply of a session's process to one step, which code in the session can forge."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from agentenv.sandbox.local.jail.messages import MAX_DATA_BYTES, REPLY, REPLY_FAILED, REPLY_TIMED_OUT

__all__ = ["MAX_REPLY_BYTES", "StepReply"]

MAX_REPLY_BYTES = REPLY.size + MAX_DATA_BYTES
_MAX_REASON_CHARS = 300
_MAX_RSS_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class StepReply:
    """What the process says of a step. Every value is in the range that an honest process could report."""

    exit: int
    timed_out: bool
    duration_s: float
    cpu_s: float
    max_rss_bytes: int
    failed: str
    """Reason why the step failed; empty if it did not."""
    data: bytes

    @classmethod
    def parse(cls, message: bytes, number: int) -> StepReply | None:
        """Return the reply to the step of this number, or None if the message is anything else."""
        if not REPLY.size <= len(message) <= MAX_REPLY_BYTES:
            return None
        answered, code, flags, duration_s, cpu_s, rss = REPLY.unpack_from(message)
        seconds_are_real = all(isfinite(seconds) and seconds >= 0 for seconds in (duration_s, cpu_s))
        if answered != number or not -64 <= code <= 255 or not seconds_are_real or rss > _MAX_RSS_BYTES:
            return None
        data = message[REPLY.size :]
        failed = data.decode(errors="replace")[:_MAX_REASON_CHARS] if flags & REPLY_FAILED else ""
        timed_out = bool(flags & REPLY_TIMED_OUT)
        return cls(code, timed_out, duration_s, cpu_s, rss, failed, b"" if failed else data)
