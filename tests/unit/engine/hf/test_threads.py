"""Threads that compute: no more than cores are free, and a team is let go when another thread begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from agentenv.engine.hf import load
from helpers.training import saved_tiny

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


@pytest.mark.parametrize(
    ("before", "free", "environment", "after", "told"),
    [
        (4, 2, {}, 2, 1),
        (2, 4, {}, 2, 0),
        (1, 1, {}, 1, 0),
        (4, 2, {"OMP_NUM_THREADS": "4"}, 4, 0),
    ],
)
def test_a_model_in_main_memory_leaves_busy_cores_to_others_and_says_so_once(
    before, free, environment, after, told, tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(load, "free_cores", lambda: free)
    load._leave_busy_cores.cache_clear()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(before)
        for _ in range(2):
            load.load_model(load.locate(saved_tiny(tmp_path / "model")), device="cpu")

        assert torch.get_num_threads() == after
        assert len([line for line in caplog.messages if "OMP_NUM_THREADS" in line]) == told
    finally:
        torch.set_num_threads(threads)
