"""The local sandbox: a jail made of the kernel's namespaces, or of Landlock if namespaces do not work.

`LocalSandbox` stands in the entry-point group `agentenv.sandboxes` under the name `local`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core import door

if TYPE_CHECKING:
    from agentenv_jail.backend import LocalSandbox as LocalSandbox
    from agentenv_jail.session import LocalSession as LocalSession

__all__ = door(__name__)
