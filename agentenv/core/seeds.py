"""Seeds that depend on what an episode is, never on when it runs."""

from __future__ import annotations

import json
from hashlib import blake2b

__all__ = ["derive_seed"]


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) from run seed, task id, member, turn and the like.

    The same parts give the same seed on every machine; order and type of the parts count.
    """
    digest = blake2b(json.dumps(parts, ensure_ascii=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
