"""Run code that a model wrote, isolated from the machine.

`create` returns a sandbox. The default one needs no account, no daemon and no privileges. It isolates code
like a container does, not like a virtual machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.sandbox.checks import MAX_JOB_BYTES as MAX_JOB_BYTES
    from agentenv.sandbox.checks import as_bytes as as_bytes
    from agentenv.sandbox.checks import clean_code as clean_code
    from agentenv.sandbox.checks import clean_command as clean_command
    from agentenv.sandbox.checks import clean_environment as clean_environment
    from agentenv.sandbox.checks import clean_path as clean_path
    from agentenv.sandbox.checks import oversized as oversized
    from agentenv.sandbox.isolation import BackendFinding as BackendFinding
    from agentenv.sandbox.isolation import SandboxDiagnosis as SandboxDiagnosis
    from agentenv.sandbox.isolation import doctor as doctor
    from agentenv.sandbox.output import Output as Output
    from agentenv.sandbox.request import ExecRequest as ExecRequest
    from agentenv.sandbox.request import SandboxLimits as SandboxLimits
    from agentenv.sandbox.sandbox import ExecResult as ExecResult
    from agentenv.sandbox.sandbox import ExecStatus as ExecStatus
    from agentenv.sandbox.sandbox import Sandbox as Sandbox
    from agentenv.sandbox.sandbox import Session as Session
    from agentenv.sandbox.sandbox import Workspace as Workspace
    from agentenv.sandbox.sandbox import create as create
    from agentenv.sandbox.sandbox import sandbox_registry as sandbox_registry
    from agentenv.sandbox.verdict import ExecVerdict as ExecVerdict
    from agentenv.sandbox.verdict import settle as settle

__all__ = door(__name__)
