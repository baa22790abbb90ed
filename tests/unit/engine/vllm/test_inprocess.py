"""vLLM in this process, as far as it can be seen without vLLM; the rest is in tests/e2e."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from agentenv.core import DependencyMissing, EngineError, EngineUnavailable
from agentenv.engine import Sampling, VLLMEngine
from agentenv.engine.hf import ModelFiles
from agentenv.engine.vllm.inprocess import vllm_sampling
from helpers.waiting import until

without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="this interpreter has vLLM")


@pytest.mark.parametrize(
    ("config", "given", "limit"),
    [
        ({"max_position_embeddings": 99}, None, 99),
        ({"max_position_embeddings": 99}, 50, 50),
        ({"text_config": {"max_position_embeddings": 70}}, None, 70),
        ({}, None, None),
    ],
)
def test_the_context_limit_is_known_before_vllm_starts(tmp_path, config, given, limit):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert VLLMEngine(ModelFiles(str(tmp_path)), max_model_len=given).max_context_tokens == limit


@without_vllm
async def test_without_vllm_the_extra_is_named(tmp_path):
    with pytest.raises(DependencyMissing, match=r"agentenv-rl\[vllm\]"):
        await VLLMEngine(ModelFiles(str(tmp_path))).generate([1], Sampling(), stop_token_ids=())


async def test_a_closed_engine_does_not_start(tmp_path):
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    await engine.close()
    await engine.close()

    with pytest.raises(EngineError, match="is closed"):
        await engine.generate([1], Sampling(), stop_token_ids=())


class StandIn:
    """Stands in for vLLM, whose tasks live on the event loop of the first request."""

    model_config = SimpleNamespace(max_model_len=99)

    def __init__(self):
        self.loop = None
        self.weights = "start"
        self.hangs = False
        self.asleep = 0

    def on_my_loop(self):
        assert asyncio.get_running_loop() is (self.loop or asyncio.get_running_loop())
        self.loop = asyncio.get_running_loop()

    async def generate(self, prompt, sampling, request_id, lora_request=None):
        self.on_my_loop()
        if self.hangs:
            await asyncio.Event().wait()
        logprobs = [{3: SimpleNamespace(logprob=-0.5)}]
        choice = SimpleNamespace(token_ids=[3], logprobs=logprobs, finish_reason="length")
        yield SimpleNamespace(outputs=[choice])

    async def pause_generation(self, mode):
        self.on_my_loop()

    async def resume_generation(self):
        self.on_my_loop()

    async def collective_rpc(self, method, kwargs):
        if "torn" in kwargs["weights_path"]:
            raise RuntimeError("a tensor is missing")
        self.weights = kwargs["weights_path"]

    async def reset_prefix_cache(self, running):
        return True

    async def sleep(self, level):
        self.on_my_loop()
        self.asleep = level

    async def wake_up(self):
        self.on_my_loop()
        assert self.asleep
        self.asleep = 0

    async def is_sleeping(self):
        return bool(self.asleep)

    def shutdown(self):
        self.weights = "gone"


@pytest.fixture
def stand_in(monkeypatch):
    engine = StandIn()
    monkeypatch.setattr("agentenv.engine.vllm.inprocess.start", lambda arguments: engine)
    monkeypatch.setattr("agentenv.engine.vllm.inprocess.vllm_sampling", lambda *given: None)
    return engine


def one_token(engine, **options):
    return engine.generate([1], Sampling(max_tokens=1), stop_token_ids=(), **options)


async def test_tokens_are_told_on_the_loop_of_the_request(tmp_path, stand_in):
    async def growing(prompt, sampling, request_id, lora_request=None):
        stand_in.on_my_loop()
        for size in (1, 3, 3):
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in range(size)]
            choice = SimpleNamespace(token_ids=list(range(size)), logprobs=logprobs, finish_reason="length")
            yield SimpleNamespace(outputs=[choice])

    stand_in.generate = growing
    engine, told = VLLMEngine(ModelFiles(str(tmp_path))), []

    def tell(tokens):
        assert asyncio.get_running_loop() is loop
        told.append(tokens)

    loop = asyncio.get_running_loop()
    done = await engine.stream([1], Sampling(max_tokens=3), tell, stop_token_ids=())
    await engine.close()

    assert done.token_ids == (0, 1, 2)
    assert told == [[0], [1, 2], []]


def test_every_event_loop_can_use_the_engine(tmp_path, stand_in):
    engine = VLLMEngine(ModelFiles(str(tmp_path)), name="vllm:several")

    played = [asyncio.run(one_token(engine)).token_ids for _ in range(2)]
    asyncio.run(engine.close())

    assert played == [(3,), (3,)]
    assert engine.max_context_tokens == 99
    assert stand_in.weights == "gone"
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("vllm:several")]


async def test_a_request_that_hangs_ends_and_may_be_tried_again(tmp_path, stand_in):
    engine = VLLMEngine(ModelFiles(str(tmp_path)), request_timeout_s=0.1)
    stand_in.hangs = True

    with pytest.raises(EngineUnavailable, match="request_timeout_s"):
        await one_token(engine, deadline_s=30)
    assert (await one_token(engine, deadline_s=0.05)).finish_reason == "abort"
    await engine.close()


async def test_a_deadline_that_has_passed_aborts_at_once(tmp_path, stand_in):
    engine = VLLMEngine(ModelFiles(str(tmp_path)), request_timeout_s=0.5)
    stand_in.hangs = True

    assert (await one_token(engine, deadline_s=0.0)).finish_reason == "abort"
    await engine.close()


@pytest.fixture
def slow_starts(stand_in, monkeypatch):
    """The vLLM engines that were started, and the event that lets their starts end."""
    started, ready = [], threading.Event()

    def start(arguments):
        started.append(StandIn())
        assert ready.wait(20)
        return started[-1]

    monkeypatch.setattr("agentenv.engine.vllm.inprocess.start", start)
    yield started, ready
    ready.set()


async def test_a_request_that_is_cancelled_while_vllm_starts_leaves_one_vllm_for_the_next(
    tmp_path, slow_starts
):
    started, ready = slow_starts
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    first = asyncio.create_task(one_token(engine))
    await until(lambda: started)
    first.cancel()
    await asyncio.wait({first})

    second = asyncio.create_task(one_token(engine))
    ready.set()

    assert (await second).token_ids == (3,)
    await engine.close()
    assert [each.weights for each in started] == ["gone"]


async def test_an_engine_that_is_closed_while_vllm_starts_leaves_no_vllm(tmp_path, slow_starts):
    started, ready = slow_starts
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    first = asyncio.create_task(one_token(engine))
    await until(lambda: started)

    await engine.close()
    ready.set()

    await asyncio.wait({first})
    await until(lambda: started[0].weights == "gone")


async def test_weights_that_were_half_loaded_are_never_sampled(tmp_path, stand_in):
    for name in ("torn", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    await one_token(engine)

    with pytest.raises(EngineError, match="a tensor is missing"):
        await engine.load_weights(tmp_path / "torn", version=1)
    with pytest.raises(EngineError, match="unknown weights"):
        await one_token(engine)
    await engine.load_weights(tmp_path / "whole", version=2)

    assert (await one_token(engine)).version_ranges == ((2, 0, 1),)
    await engine.close()


async def test_with_its_option_it_rests_until_it_is_woken(tmp_path, stand_in):
    engine = VLLMEngine(ModelFiles(str(tmp_path)), sleep=True)
    await engine.rest()  # nothing was started yet
    await one_token(engine)
    slept = []
    for step in (engine.rest, engine.wake, engine.wake):
        await step()
        slept.append(stand_in.asleep)
    await one_token(engine)
    await engine.close()

    assert slept == [1, 0, 0]
    assert VLLMEngine(ModelFiles(str(tmp_path)))._arguments.get("enable_sleep_mode") is None
    assert engine._arguments["enable_sleep_mode"] is True


async def test_without_the_option_it_never_rests(tmp_path, stand_in):
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    await one_token(engine)
    await engine.rest()
    assert stand_in.asleep == 0
    await engine.wake()
    await engine.close()


async def test_a_bad_path_is_refused_before_vllm_is_touched(tmp_path):
    with pytest.raises(EngineError, match="nothing was changed"):
        await VLLMEngine(ModelFiles(str(tmp_path))).load_weights(tmp_path / "nowhere")


def test_stop_strings_make_vllm_decode_with_control_tokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))

    plain = vllm_sampling(Sampling(), 8, (3,))
    stopped = vllm_sampling(Sampling(stop=("END",)), 8, (3,))

    assert (plain["stop"], plain["detokenize"]) == ([], False)
    assert (stopped["stop"], stopped["detokenize"], stopped["skip_special_tokens"]) == (["END"], True, False)
