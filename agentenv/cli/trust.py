"""Say what a run executes before it is executed, and ask for `--trust` where somebody else made the run."""

from __future__ import annotations

import os
import sys

from agentenv.runs.store.runinfo import RunInfo
from agentenv.runs.store.trust import executed_files, require_trust

__all__ = ["announce"]


def announce(info: RunInfo, *, trust: bool, purpose: str) -> None:
    """Print the files that a run executes.

    Args:
        info: info of the run.
        trust: whether `--trust` stands on the command line.
        purpose: what is done with the run, such as "resuming".

    Raises:
        UsageError: This user did not make the run, and there is no `--trust`.
    """
    require_trust(info, trust=trust, purpose=purpose)
    files = executed_files(info.config)
    if files and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{purpose} {info.id} executes {', '.join(files)}\n")
