"""Code in a jail of this machine's kernel: namespaces, or Landlock where those are not to be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.sandbox.local.backend import LocalSandbox as LocalSandbox
    from agentenv.sandbox.local.session import LocalSession as LocalSession

__all__ = door(
    __name__,
    {
        "backend": ["LocalSandbox"],
        "session": ["LocalSession"],
    },
)
