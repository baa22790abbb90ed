"""A training on a stream of groups, with a real model, engine and checkpoints."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from random import Random
from zlib import crc32

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.core import UsageError
from agentenv.engine import TransformersEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer
from agentenv.training.loop import Mixture, last_checkpoint
from helpers.waiting import until, wait_until

GROUPS = 2


class Parrot(ToolEnv):
    """Rewards answers so that hardly two are worth the same. The tasks in `held` begin only when their event is set."""

    held: dict[int, asyncio.Event] = {}  # noqa: RUF012 - replaced by each test
    alive = 0

    async def start(self, n: int) -> str:
        type(self).alive += 1
        if n in self.held:
            await self.held[n].wait()
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return crc32(answer.encode()) / 2**32

    def close(self) -> None:
        type(self).alive -= 1


SPEC = EnvSpec.of("test/Parrot-v0", Parrot, tasks=[{"n": n} for n in range(6)])


@pytest.fixture(autouse=True)
def _anew():
    Parrot.held, Parrot.alive = {}, 0


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.2, **sizes)).eval()


def make(tmp_path, *, model=None, engine=None, rollout=None, on_metrics=None, **options) -> GRPOTrainer:
    settings = {
        "groups_per_step": GROUPS,
        "num_generations": 2,
        "learning_rate": 0.02,
        "max_steps": 5,
        "max_ahead": 2,
        "output_dir": str(tmp_path),
        **options,
    }
    return GRPOTrainer(
        GRPOConfig(**settings),
        model=model or tiny(),
        engine=engine,
        rollout=rollout,
        callbacks=Callbacks(on_metrics=on_metrics),
        tokenizer=byte_tokenizer(),
        envs=SPEC,
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=3),
    )


def dealt(count: int) -> list[str]:
    """Return the ids of the first groups of a run, in the order of dealing."""
    mixture, ids, cursors = Mixture(SPEC), [], {}
    for round_index in range(1, count // GROUPS + 1):
        tasks, cursors = mixture.deal(
            GROUPS, seed=0, round_index=round_index, cursors=cursors, left_out=frozenset()
        )
        ids += [f"test/Parrot-v0:{one.task.id}@{round_index}" for one in tasks]
    return ids


def watch(trainer: GRPOTrainer, trained: dict[int, list[str]]) -> None:
    """Note the groups that each step trains on."""
    step = trainer.step

    def noted(groups, **options):
        trained[trainer.steps_done] = [group.group_id for group in groups]
        return step(groups, **options)

    trainer.step = noted


def test_every_group_is_trained_once_and_at_most_so_many_steps_after_it_began(tmp_path):
    trained: dict[int, list[str]] = {}
    trainer = make(tmp_path)
    watch(trainer, trained)

    history = trainer.train()

    assert Counter(chain(*trained.values())) == Counter(dealt(10))
    assert [one["updates"] for one in history] == [1] * 5
    assert all(one["staleness/max"] <= 2 for one in history)
    assert all(
        one["time/wait"] == pytest.approx(one["time/wait/groups"] + one["time/wait/staleness"])
        for one in history
    )
    assert {"stream/playing", "stream/queued", "stream/finished", "time/ready"} <= history[0].keys()
    assert trainer.engine.model is not trainer.model
    assert trainer.engine.weights_version == 5
    ours = dict(trainer.model.named_parameters())
    assert all(torch.equal(one, ours[name]) for name, one in trainer.engine.model.named_parameters())
    assert Parrot.alive == 0


def test_a_long_group_is_overtaken_until_its_last_step_which_waits_for_it(tmp_path):
    trained: dict[int, list[str]] = {}
    trainer = make(tmp_path)
    watch(trainer, trained)
    first = dealt(2)[0]
    number = int(next(task for task in SPEC.task_set() if f":{task.id}@" in first).data["n"])
    waiting: list[bool] = []

    async def run():
        Parrot.held = {number: asyncio.Event()}
        training = asyncio.create_task(trainer.run())
        # The third step has its groups and waits for the first group all the same, which began before any.
        stream = await until(lambda: trainer.rollouts._playing)
        choose = stream[0]._choose

        def chosen():
            batch, enough = choose()
            waiting.append(batch is None and enough)
            if waiting[-1]:
                Parrot.held[number].set()
            return batch, enough

        stream[0]._choose = chosen
        return await training

    history = asyncio.run(run())

    assert any(waiting)
    assert first in trained[2]
    assert history[2]["time/wait/staleness"] > 0
    assert history[0]["time/wait/staleness"] == history[1]["time/wait/staleness"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_broken_off_anywhere_loses_no_group_and_trains_none_twice(tmp_path, seed):
    trained: dict[int, list[str]] = {}
    random = Random(seed)

    def broken_off_after(events: int | None) -> bool:
        trainer = make(tmp_path, save_steps=1)
        checkpoint = last_checkpoint(tmp_path)
        if checkpoint is not None:
            trainer.resume(checkpoint)
        watch(trainer, trained)
        left = [events]

        async def run():
            task = asyncio.create_task(trainer.run())
            loop = asyncio.get_running_loop()

            def count(work):
                def counted(*args, **options):
                    if left[0] is not None:
                        left[0] -= 1
                        if left[0] == 0:
                            loop.call_soon_threadsafe(task.cancel)
                    return work(*args, **options)

                return counted

            for owner, name in (
                (trainer, "step"),
                (trainer, "save_step"),
                (trainer.rollouts.sync, "bring"),
                (trainer.engine, "generate"),
            ):
                setattr(owner, name, count(getattr(owner, name)))
            await task

        try:
            asyncio.run(run())
        except asyncio.CancelledError:
            return False
        return True

    for _ in range(4):
        broken_off_after(random.randint(1, 16))
        assert Parrot.alive == 0
    assert broken_off_after(None)

    assert sorted(trained) == list(range(5))
    assert Counter(chain(*trained.values())) == Counter(dealt(10))


def test_a_rollout_function_plays_each_group_of_a_stream(tmp_path):
    asked: list[int] = []

    async def rollout(play, tasks):
        asked.append(len(tasks))
        return await play()

    trained: dict[int, list[str]] = {}
    trainer = make(tmp_path, rollout=rollout)
    watch(trainer, trained)

    trainer.train()

    assert asked == [1] * 10
    assert Counter(chain(*trained.values())) == Counter(dealt(10))


def test_a_rollout_function_that_fails_ends_the_run(tmp_path):
    async def rollout(play):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make(tmp_path, rollout=rollout).train()


def test_batches_do_not_go_on_where_a_stream_has_dealt_groups(tmp_path):
    first = make(tmp_path, save_steps=1, on_metrics=lambda step, _: step == 2 and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.train()
    trainer = make(tmp_path, max_ahead=0)
    trainer.resume(tmp_path / "checkpoints" / "step-1")

    with pytest.raises(UsageError, match="6 groups that a stream dealt and did not train"):
        trainer.train()


def test_a_stream_goes_on_where_batches_were_trained(tmp_path):
    trained: dict[int, list[str]] = {}
    first = make(tmp_path, save_steps=2, max_steps=2, max_ahead=0)
    watch(first, trained)
    first.train()
    trainer = make(tmp_path)
    trainer.resume(tmp_path / "checkpoints" / "step-2")
    watch(trainer, trained)

    trainer.train()

    assert Counter(chain(*trained.values())) == Counter(dealt(10))


def test_an_engine_that_shares_the_model_is_refused(tmp_path):
    model = tiny()

    with pytest.raises(UsageError, match="samples from the very model in training"):
        make(tmp_path, model=model, engine=TransformersEngine(model)).train()


KILLED = """
import json, sys
sys.path[:0] = sys.argv[2:]
from test_stream_training import last_checkpoint, make
from pathlib import Path

out = Path(sys.argv[1])
trainer = make(out, save_steps=1)
checkpoint = last_checkpoint(out)
if checkpoint is not None:
    trainer.resume(checkpoint)
step = trainer.step

def noted(groups, **options):
    with (out / "trained.jsonl").open("a") as file:
        file.write(json.dumps([trainer.steps_done, [group.group_id for group in groups]]) + "\\n")
    return step(groups, **options)

trainer.step = noted
trainer.train()
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_no_group_and_trains_none_twice(tmp_path):
    own = Path(__file__)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(own.parent), str(own.parents[3])]
    log = tmp_path / "trained.jsonl"

    def lines() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    for steps in (1, 3):  # killed while the first and about the third step are made
        with subprocess.Popen(command) as process:
            wait_until(lambda: len(lines()) >= steps, seconds=120)  # noqa: B023 - called in this turn
            process.kill()
    subprocess.run(command, check=True, timeout=300)

    trained = dict(json.loads(line) for line in lines())
    assert sorted(trained) == list(range(5))
    assert Counter(chain(*trained.values())) == Counter(dealt(10))
