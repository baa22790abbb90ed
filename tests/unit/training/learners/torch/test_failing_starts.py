"""One process fails while the training begins: the others are told, and none waits for it."""

from __future__ import annotations

import pytest

from helpers.ranks import run_driver

pytestmark = pytest.mark.slow

# Each rank is a fork of this process. The second one fails, in a way of its own for each case.
DRIVER = """
from agentenv.core import AgentEnvError, ModelNotFound
from agentenv.training.learners.torch import world


def trainer(model=None, **options):
    return GRPOTrainer(GRPOConfig(dtype="float64", device="cpu", **options), model=model or tiny())


def failing(model, *, packed=False, after=0):
    # The second layer is the second one of a pass, whose shards all ranks gather together.
    def fail(module, given, named):
        nonlocal after
        if os.environ["RANK"] == "1" and (not packed or named.get("attention_mask") is not None):
            raise RuntimeError("out of memory")
    model.model.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
    return model


def fails(kind, text, **given):
    try:
        trainer(**given)
    except kind as error:
        assert text in str(error), (os.environ["RANK"], error)
    else:
        raise AssertionError(f"process {os.environ['RANK']} went on")


def no_model():
    if os.environ["RANK"] == "1":
        fails(ModelNotFound, "no model", model="/no/such/model")
    else:
        fails(AgentEnvError, "another process failed: there is no model at")


def no_memory():
    if os.environ["RANK"] == "1":
        fails(RuntimeError, "out of memory", model=failing(tiny()))
    else:
        fails(AgentEnvError, "another process failed: RuntimeError: out of memory")


def one_cannot_pack():
    made = trainer(failing(tiny(), packed=True))
    assert not made.learner.policy.packable
    assert "out of memory" in made.learner.policy.pack_reason


def no_memory_in_a_sharded_pass():
    world.MOST_APART_S = 0.2
    fails(RuntimeError, "", model=failing(tiny()), fsdp=True)


play(globals()[sys.argv[1]], 2)
"""


@pytest.mark.parametrize("case", ["no_model", "no_memory", "one_cannot_pack", "no_memory_in_a_sharded_pass"])
def test_the_others_are_told_that_one_process_failed_at_the_start(case):
    run_driver(DRIVER, case)
