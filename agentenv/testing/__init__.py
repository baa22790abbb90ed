"""What authors of tools and environments use in their own tests."""

from __future__ import annotations

__all__: list[str] = []
