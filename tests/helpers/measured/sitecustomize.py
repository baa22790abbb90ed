"""Start the recording in a program that is one of ours and runs in a process of its own; see `recorder`."""

import os
import sys

RECORDED = {"agentenv.tools.process_main", "agentenv.workers.local_main"}

if "AGENTENV_RECORDED" in os.environ and RECORDED & set(sys.orig_argv):
    exec(os.environ["AGENTENV_RECORDED"])
