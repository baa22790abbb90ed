"""Threads that compute: a team of OpenMP threads is let go when another thread begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

COUNTED = """
import ctypes, os, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from agentenv.engine.hf import TransformersEngine
from agentenv.engine.hf.threads import dismiss_team

if not hasattr(ctypes.CDLL(None), "omp_pause_resource_all"):
    sys.exit(3)
torch.set_num_threads(2)
square = torch.randn(400, 400)

def threads():
    return len(os.listdir("/proc/self/task"))

def falls_to(number):
    for _ in range(500):
        if threads() <= number:
            return True
        time.sleep(0.01)
    return False

product = square @ square
child = os.fork()
if not child:
    dismiss_team()  # of the team that is not in this process
    os._exit(0)
for _ in range(500):
    if os.waitpid(child, os.WNOHANG)[0]:
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    raise AssertionError("a fork waits for threads that it does not have")

square @ square
team = threads()
dismiss_team()
assert falls_to(team - 1), "the second thread has ended"
assert torch.equal(square @ square, product)
assert threads() == team, "a new team"

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)).eval()
engine = TransformersEngine(model)
engine._start_worker()
assert engine._worker is not None
assert falls_to(team) and engine._worker is not None, "the worker is there, the caller's second thread is not"
assert torch.equal(square @ square, product)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_team_of_a_thread_ends_when_another_computes():
    done = subprocess.run(
        [sys.executable, "-c", COUNTED],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 3:
        pytest.skip("torch computes without GNU's OpenMP")
    assert done.returncode == 0, done.stderr
