"""Seeds that depend on the run, task and member of an episode, never on when the episode runs."""

from __future__ import annotations

import json
from hashlib import blake2b

__all__ = ["derive_seed"]


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) computed from parts such as run seed, task id, member and turn.

    The same parts have the same seed on every machine; the order and the types of the parts matter.
    """
    digest = blake2b(json.dumps(parts, ensure_ascii=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
