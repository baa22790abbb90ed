"""The local sandbox: a jail made of the kernel's namespaces, or of Landlock if namespaces do not work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.sandbox.local.backend import LocalSandbox as LocalSandbox
    from agentenv.sandbox.local.session import LocalSession as LocalSession

__all__ = door(__name__)
