"""Keep the head and the tail of an output stream of any length."""

from __future__ import annotations

__all__ = ["Output"]


class Output:
    """Head and tail of one stream; it uses at most three times the memory of the bytes that it returns."""

    __slots__ = ("_head", "_keep", "_tail", "total")

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        self.total += len(data)
        half = self._keep // 2
        room = half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._keep:
            del self._tail[: len(self._tail) - (self._keep - half)]

    @property
    def truncated(self) -> bool:
        """True if something was left out."""
        return self.total > self._keep

    def text(self) -> str:
        """Return the stream as text; if it was cut, a marker stands between head and tail."""
        if not self.truncated:
            return (self._head + self._tail).decode("utf-8", errors="replace")
        tail = self._tail[-(self._keep - len(self._head)) :]
        cut = self.total - len(self._head) - len(tail)
        head, rest = (part.decode("utf-8", errors="replace") for part in (self._head, tail))
        return f"{head}\n[... {cut} bytes left out ...]\n{rest}"
