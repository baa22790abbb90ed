"""Two processes play and train together, and tell each other what fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.ranks import run_driver
from scenes import language_model

pytestmark = pytest.mark.slow

DRIVER = """
import asyncio, copy, logging, time
from datetime import timedelta
from agentenv.core import AgentEnvError, EngineError, RunLimits, UsageError
from agentenv.engine.hf import TransformersEngine
from agentenv.training.loop.sync import open_engine, push
from safetensors.torch import load_file
from scenes import language_model, numbered, trainer as trainer_of_scene


def make(sharded, **options):
    config = GRPOConfig(packing="padded", tokens_per_micro_batch=12, fsdp=sharded, **options)
    return GRPOTrainer(config, model=tiny_gpt2())


def take_step(trainer):
    groups = [group(str(one) * (one + 1), [0.0, 1.0, 2.0]) for one in range(3)]
    return trainer.step((groups[:2], groups[2:])[trainer.world.rank])


def refused(error, said, work):
    try:
        work()
    except error as raised:
        assert said in str(raised), raised
    else:
        raise AssertionError(f"nothing was raised: {said}")


def refusals():
    trainer = make(True, output_dir=f"{OUT}/shard")
    refused(UsageError, "pass engine= with a copy", lambda: open_engine(trainer.learner, None, model_name=""))

    class Broken:
        async def load_weights(self, path, *, version=None):
            raise EngineError("disk on fire")

        load_adapter = load_weights

    for share in (lambda: asyncio.run(push(trainer.learner, Broken(), None)), lambda: trainer.save("/dev/null/x")):
        try:
            share()
        except AgentEnvError as error:
            assert ("another process failed" in str(error)) == (trainer.world.rank == 1), error
        else:
            raise AssertionError("nothing was raised")


def late():
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    trainer = make(False)
    if trainer.world.rank == 1:
        time.sleep(2)  # its episodes end after the limit of torch's own group
    assert trainer.world.total(1) == 2
    assert take_step(trainer)["updates"] == 1


class FromDisk(TransformersEngine):
    # One server for all processes: what the first one is told to read, all of them sample from.

    read = None

    async def load_weights(self, path, *, version=None):
        self.weights_version = version
        return version

    async def load_adapter(self, name, path, *, version=None):
        raise NotImplementedError

    async def generate(self, *args, **options):
        if self.read != self.weights_version:
            self.read = self.weights_version
            path = f"{OUT}/pushed/weights/weights-{self.read}/model.safetensors"
            self.model.load_state_dict(load_file(path), strict=False)
        return await super().generate(*args, **options)


def loop(how):
    sharded = how not in ("synchronous", "stream")
    model = language_model(vocab_size=300, hidden_size=32, intermediate_size=48)
    followed = []

    def follows(step, metrics):
        if sharded and how != "pushed":
            pairs = zip(trainer.model.parameters(), trainer.engine.model.parameters(), strict=True)
            followed.append(all([torch.equal(whole(ours.detach()), theirs) for ours, theirs in pairs]))

    trainer = trainer_of_scene(
        Path(OUT) / how, model=model, envs=numbered(count=8), on_metrics=follows, fsdp=sharded, groups_per_step=3,
        num_generations=3, save_steps=3, eval_on_start=False, limits=RunLimits(max_turns=1, max_tokens_per_turn=6),
        refill_rounds=1, max_ahead={"stream": 2, "sharded stream": 1}.get(how, 0),
        engine=(FromDisk if how == "pushed" else TransformersEngine)(copy.deepcopy(model)) if sharded else None,
        eval_tasks=[{"n": n} for n in range(3)] if sharded else None,
    )
    history = trainer.train()
    assert all(followed) and len(followed) == (3 if sharded and how != "pushed" else 0), followed
    assert not sharded or history[-1]["eval/tasks"] == 3.0
    weights = torch.cat([whole(one.detach()).flatten() for one in trainer.model.parameters()])
    torch.save(weights, f"{OUT}/{how}-{trainer.world.rank}")
    with open(f"{OUT}/{how}-{trainer.world.rank}.json", "w") as file:
        json.dump([history, trainer.cursors], file)


def equal_at_the_start():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("agentenv").addHandler(handler)
    # What a user's unseeded adapter or head does: every process draws other numbers.
    rank = int(os.environ["RANK"])
    model = language_model(rank).bfloat16()
    model.model.norm.weight.data.fill_(0.5)  # the same in all of them
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    trainer = GRPOTrainer(GRPOConfig(), model=model)
    torch.save(torch.cat([one.detach().flatten() for one in trainer.model.parameters()]), f"{OUT}/replicas-{rank}")
    with open(f"{OUT}/replicas-{rank}.json", "w") as file:
        json.dump(said, file)
    other = language_model(num_hidden_layers=1 + rank)
    refused(UsageError, "models of different shapes", lambda: GRPOTrainer(GRPOConfig(), model=other))


play(refusals, 2)
play(late, 2)  # raises where the limit of the default group holds
play(equal_at_the_start, 2)
for how in ("synchronous", "stream", "sharded", "sharded stream", "pushed"):
    play(lambda: loop(how), 2)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("processes")
    run_driver(DRIVER, out)
    return out


@pytest.mark.parametrize("how", ["synchronous", "stream", "sharded", "sharded stream", "pushed"])
def test_two_processes_play_their_share_and_keep_equal_weights(found, how):
    (history, cursors), (others, other_cursors) = (
        json.loads((found / f"{how}-{rank}.json").read_text()) for rank in range(2)
    )

    assert torch.equal(torch.load(found / f"{how}-0"), torch.load(found / f"{how}-1"))
    assert cursors == other_cursors
    assert all(one["episodes"] % 3 == 0 and one["episodes"] >= 9 for one in history)
    assert [one["updates"] for one in history] == [1.0, 1.0, 1.0]
    assert [one["loss"] for one in history] == [one["loss"] for one in others]
    assert (found / how / "checkpoints" / "step-3" / "model.safetensors").exists()
    assert len((found / how / "metrics.jsonl").read_text().splitlines()) == 3


def test_processes_with_weights_of_their_own_start_with_those_of_the_first_and_say_so(found):
    first, second = (torch.load(found / f"replicas-{rank}") for rank in range(2))
    said, also_said = (json.loads((found / f"replicas-{rank}.json").read_text()) for rank in range(2))

    model = language_model(0).bfloat16()
    model.model.norm.weight.data.fill_(0.5)
    assert torch.equal(first, torch.cat([one.detach().flatten() for one in model.parameters()]))
    assert torch.equal(first, second)
    assert said == also_said
    assert any("9 weights were not the same in all processes" in line for line in said)


KILLED = """
import signal
import agentenv as ae
from scenes import trainer

lost = int(sys.argv[2])


def train():
    rank = int(os.environ["RANK"])

    def killed(step, metrics):
        if step == 2 and rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        trainer(Path(OUT), max_steps=4, save_steps=0, on_metrics=killed).train()
    except ae.AgentEnvError as error:
        told = {"rank": rank, "kind": type(error).__name__, "said": str(error)}
        Path(OUT, "said").write_text(json.dumps(told))


try:
    play(train, 2)
except AssertionError:
    pass  # one was killed
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_when_one_of_two_processes_is_killed_the_other_says_so_and_its_last_step_is_saved(tmp_path, lost):
    out = tmp_path / "out"
    out.mkdir()

    run_driver(KILLED, out, str(lost))

    told = json.loads((out / "said").read_text())
    assert (told["rank"], told["kind"]) == (1 - lost, "TrainingFailed")
    assert f"another process of the launch has ended, and rank {1 - lost} cannot go on" in told["said"]
    saved = out / "checkpoints" / "step-2"
    assert json.loads((saved / "trainer_state.json").read_text())["steps_done"] == 2
    assert (saved / "model.safetensors").is_file()
