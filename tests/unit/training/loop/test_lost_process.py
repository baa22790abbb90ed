"""One of two processes that train by hand is killed: the other one says so, and its last step is saved."""

from __future__ import annotations

import json

import pytest

from helpers.ranks import run_driver
from helpers.training import saved_tiny

pytestmark = pytest.mark.slow

# A process with threads must not fork, so a program of its own makes the two ranks.
PROGRAM = """
import json, os, signal, socket, sys
import torch
import torch.distributed as dist
import agentenv as ae
from agentenv.core import RunLimits
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer

model, out, lost = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)

class Echo(ae.ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10

ae.register("lost/Echo-v0", Echo, tasks=[{"n": n} for n in range(8)])

def train(rank):
    def killed(step, metrics):
        if step == 2 and rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
    config = GRPOConfig(model=model, output_dir=out, max_steps=4, groups_per_step=2, num_generations=2,
                        learning_rate=0.01, save_steps=0)
    trainer = GRPOTrainer(config, envs="lost/Echo-v0", limits=RunLimits(max_turns=1, max_tokens_per_turn=4),
                          callbacks=Callbacks(on_metrics=killed))
    try:
        trainer.train()
    except ae.AgentEnvError as error:
        print(json.dumps({"rank": rank, "kind": type(error).__name__, "said": str(error)}),
              file=open(f"{out}/said", "w"))

with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = str(listener.getsockname()[1])
ranks = []
for rank in range(2):
    if pid := os.fork():
        ranks.append(pid)
        continue
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        train(rank)
    finally:
        os._exit(0)
for pid in ranks:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_when_one_of_two_processes_is_killed_the_other_says_so_and_its_last_step_is_saved(tmp_path, lost):
    out = tmp_path / "out"
    out.mkdir()

    run_driver(PROGRAM, saved_tiny(tmp_path / "model"), out, str(lost))

    told = json.loads((out / "said").read_text())
    assert (told["rank"], told["kind"]) == (1 - lost, "TrainingFailed")
    assert f"another process of the launch has ended, and rank {1 - lost} cannot go on" in told["said"]
    saved = out / "checkpoints" / "step-2"
    assert json.loads((saved / "trainer_state.json").read_text())["steps_done"] == 2
    assert (saved / "model.safetensors").is_file()
