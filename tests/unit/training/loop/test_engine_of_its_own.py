"""An engine that reads the trainer's weights from a directory follows it, and is checked each time."""

from __future__ import annotations

import asyncio
import copy
from contextlib import nullcontext

import pytest
from safetensors.torch import load_file

from agentenv.core import EngineError, UsageError
from agentenv.engine import Features, TransformersEngine, policy_of
from agentenv_extras import RouterEngine
from scenes import language_model, runner, trainer


class FromDisk(TransformersEngine):
    """Reads weights from a directory, as vLLM does; a deaf one says so and does not."""

    def __init__(self, model, *, deaf=False):
        super().__init__(copy.deepcopy(model), name="from disk")
        self.deaf = deaf
        self.read = []

    async def load_weights(self, path, *, version=None):
        self.read.append(path.name)
        with self.updating(version):
            if not self.deaf:
                self.model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        return self.weights_version

    async def load_adapter(self, name, path, *, version=None):
        raise EngineError("takes no adapters")


def make_trainer(tmp_path, engine_of, **settings):
    model = language_model(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    options = {"num_generations": 4, "learning_rate": 0.05, **settings}
    return trainer(tmp_path, model=model, **{"engine": engine_of(model), **options})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_weights_are_pushed_before_the_first_step_and_after_each(tmp_path, temperature):
    training = make_trainer(tmp_path, FromDisk, temperature=temperature)

    history = training.train()

    assert training.engine.read == ["weights-0", "weights-1", "weights-2", "weights-3"]
    assert training.engine.weights_version == training.weights_version == 3
    assert [step["updates"] for step in history] == [1, 1, 1]
    assert all(step["sync/k3"] < 1e-6 and step["mismatch/k3"] < 1e-6 for step in history)
    assert all(step["sync/frac_outside"] == 0 and step["time/sync"] > 0 for step in history)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["weights-2", "weights-3"]


def test_weights_that_did_not_arrive_stop_the_run_with_the_reason(tmp_path):
    training = make_trainer(tmp_path, lambda model: FromDisk(model, deaf=True))

    with pytest.raises(EngineError, match="did not arrive"):
        training.train()
    assert training.steps_done == 1


def test_an_evaluation_is_of_the_present_weights(tmp_path):
    training = make_trainer(tmp_path, FromDisk, eval_tasks=[{"n": 1}])

    training.evaluate()
    training.evaluate()

    assert training.engine.read == ["weights-0"]


@pytest.mark.parametrize("policy", ["shared", "copied", "from disk"])
def test_beside_a_helper_the_policys_weights_follow_and_the_helpers_stay(tmp_path, policy):
    def pair(model):
        own = {"shared": model, "copied": copy.deepcopy(model)}
        engine = FromDisk(model) if policy == "from disk" else TransformersEngine(own[policy])
        return RouterEngine(engine, FromDisk(model), unsure=lambda done: done.token_ids[0] % 2 == 0)

    training = make_trainer(tmp_path, pair)
    history = training.train()

    router = training.engine
    assert router.routed > 0
    assert policy_of(router).weights_version == training.weights_version == 3
    assert router._helper.read == []
    assert all(step["mismatch/k3"] < 1e-6 for step in history)


def test_an_engine_without_weights_is_refused_in_words(tmp_path):
    training = make_trainer(tmp_path, lambda _: runner("hello").engine)

    with pytest.raises(UsageError, match="scripted has no way to take new weights"):
        training.train()


@pytest.mark.parametrize("fails", [True, False])
def test_connections_are_closed_with_the_event_loop_they_belong_to(tmp_path, fails):
    class OverTheWire(FromDisk):
        loops = ()

        async def load_weights(self, path, *, version=None):
            if fails:
                raise EngineError("no")
            return await super().load_weights(path, version=version)

        @property
        def features(self):
            return Features(disconnect=self.disconnect)

        async def disconnect(self):
            self.loops = (*self.loops, asyncio.get_running_loop())

    training = make_trainer(tmp_path, OverTheWire, max_steps=1, eval_tasks=[{"n": 1}])

    for run in (training.train, training.evaluate):
        with pytest.raises(EngineError) if fails else nullcontext():
            run()

    assert len(set(training.engine.loops)) == 2


def test_each_process_evaluates_its_share_of_the_tasks(tmp_path):
    class Second:
        rank, size, sharded = 1, 2, False

        def gather(self, values):
            return list(values)

    training = make_trainer(tmp_path, lambda _: None, eval_tasks=[{"n": n} for n in range(5)])
    training.learner.policy.world = Second()

    assert training.evaluate()["eval/tasks"] == 2.0


def test_held_out_tasks_that_never_end_are_not_evaluated_without_a_number(tmp_path, caplog):
    training = make_trainer(tmp_path, lambda _: None, eval_tasks=lambda seed: {"n": seed})

    assert training.evaluate() == {}
    assert "set eval_tasks" in caplog.text


@pytest.mark.parametrize("engine", ["mock", "openai:gpt", "hf:model"])
def test_only_engines_that_take_weights_can_be_named(tmp_path, engine):
    training = make_trainer(tmp_path, lambda _: None, engine=engine)

    with pytest.raises(UsageError, match="takes no weights"):
        training.train()
