"""The server engine against a loopback server that keeps vLLM's protocol, faults included."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode
from collections import Counter
from importlib import import_module

import numpy as np
import pytest

from agentenv.core import ContextTooLong, EngineError, EngineUnavailable, ModelNotFound, UsageError
from agentenv.engine import ChatEngine, Sampling, VLLMServerEngine, load_engine
from agentenv.engine.vllm import ServerReport, connect, probe
from agentenv.engine.vllm.experts import decode_experts
from agentenv.engine.vllm.pool import ServerPool
from helpers.fake_vllm import (
    ROUTES,
    STOP,
    FakeVLLM,
    cache_metrics,
    connected,
    engine_on,
    experts_of,
    in_a_thread,
    say,
    serving,
)
from helpers.waiting import until


@ROUTES
async def test_tokens_and_logprobs_come_through_either_route(route):
    async with serving(route=route) as fake, engine_on(fake) as engine:
        done = await say(engine, stop=(STOP,), temperature=0.5)

        assert engine.report.route == route
        assert (done.finish_reason, done.token_ids[-1], len(done.logprobs)) == ("stop", STOP, 4)
        assert done.version_ranges == ((0, 0, 4),)
        sent = fake.seen[0].get("sampling_params", fake.seen[0])
        assert (sent["temperature"], sent["seed"], sent["ignore_eos"]) == (0.5, 0, True)
        assert [1, 2, 3] in (fake.seen[0].get("token_ids"), fake.seen[0].get("prompt"))


@ROUTES
async def test_stop_strings_are_sent_and_may_end_a_completion_with_any_token(route):
    async with serving(route=route) as fake, engine_on(fake) as engine:
        fake.plan = ["stopped", "stopped"]

        done = await engine.generate([1, 2], Sampling(max_tokens=4, stop=("END",)), stop_token_ids=(STOP,))

        sent = fake.seen[0].get("sampling_params", fake.seen[0])
        assert (sent["stop"], sent["skip_special_tokens"]) == (["END"], False)
        assert done.finish_reason == "stop"
        assert done.token_ids[-1] != STOP
        with pytest.raises(EngineError, match="not a stop token"):
            await engine.generate([1, 2], Sampling(max_tokens=4), stop_token_ids=(STOP,))
        assert "stop" not in fake.seen[1].get("sampling_params", fake.seen[1])


@ROUTES
async def test_the_probe_tells_unscaled_logprobs_and_the_engine_says_why_not_to_train(route):
    async with serving(route=route, scaled=False) as fake, engine_on(fake) as engine:
        assert engine.report.logprobs == "raw"
        assert "--logprobs-mode processed_logprobs" in engine.features.untrainable
        assert any("processed_logprobs" in lack for lack in engine.report.missing)
    async with serving(route=route) as fake, engine_on(fake) as engine:
        assert (engine.report.logprobs, engine.features.untrainable) == ("processed", "")


async def test_a_server_without_token_ids_serves_chats_after_one_warning():
    async with serving(route="completions", token_ids=False) as fake:
        with pytest.warns(UserWarning, match="evaluated but not trained"):
            engine, tokenizer = await asyncio.to_thread(connect, fake.url)
        assert isinstance(engine, ChatEngine)
        assert tokenizer is None
        await engine.close()


async def test_a_server_that_is_starting_is_waited_for(monkeypatch):
    loop = asyncio.get_running_loop()
    async with serving() as fake:
        await fake.stop()
        with pytest.raises(EngineUnavailable):
            await asyncio.to_thread(connect, fake.url, tokenizer="x")
        module = import_module("agentenv.engine.vllm.connect")  # its name in the door is the function's
        monkeypatch.setattr(
            module, "sleep", lambda _: asyncio.run_coroutine_threadsafe(fake.come_back(), loop).result()
        )

        async with connected(fake.url, start_timeout_s=600) as engine:
            assert engine.report.route == "generate"


async def test_a_tokenizer_on_another_machine_must_be_named():
    async with serving() as fake:
        with pytest.raises(ModelNotFound, match="--tokenizer"):
            await asyncio.to_thread(load_engine, f"{fake.url}/v1")


@pytest.mark.parametrize("fault", [429, 503, "close"])
async def test_busy_servers_and_broken_connections_are_tried_again(fault):
    async with serving() as fake, engine_on(fake) as engine:
        fake.plan = [fault, None]

        done = await say(engine)

        assert len(done.token_ids) == 4
        assert len(fake.seen) == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (500, "answered with status 500: fault 500"),
        (400, "answered with status 400: fault 400"),
        ("nonsense", "is not a JSON object"),
        ("empty", "is not a completion"),
        ("short", "3 tokens, but 4 log-probabilities"),
        ("infinite", "not finite"),
    ],
)
async def test_a_wrong_answer_is_one_clear_error_at_once(fault, said):
    async with serving() as fake, engine_on(fake) as engine:
        fake.plan = [fault]

        with pytest.raises(EngineError, match=said):
            await say(engine)
        assert len(fake.seen) == 1


async def test_a_deadline_aborts_and_frees_the_request_on_the_server():
    async with serving() as fake, engine_on(fake) as engine:
        fake.gate = asyncio.Event()

        done = await say(engine, deadline_s=1.0)
        await fake.until(0)

        assert (done.finish_reason, done.token_ids) == ("abort", ())
        assert fake.dropped == 1


async def test_a_prompt_over_the_context_is_said_before_and_by_the_server():
    async with serving() as fake, engine_on(fake) as engine:
        with pytest.raises(ContextTooLong, match="64"):
            await say(engine, prompt=[1] * 64)
        engine.max_context_tokens = None
        with pytest.raises(ContextTooLong, match="maximum context length"):
            await say(engine, prompt=[1] * 64)


async def test_episodes_stay_with_their_server_and_move_when_it_dies():
    async with serving() as one, serving() as two, engine_on(one, two) as engine:
        for fake in (one, two):
            fake.sessions.clear()
        for _ in range(3):
            for session in "abcd":
                await say(engine, session=session)
        assert (len(one.seen), len(two.seen)) == (6, 6)
        assert not set(one.sessions) & set(two.sessions)
        await one.stop()

        for session in "abcd":
            await say(engine, session=session)

        assert len(two.seen) == 10


async def test_a_server_killed_and_restarted_in_mid_run_loses_no_episode():
    async with serving() as fake, engine_on(fake, retry_s=20) as engine:
        await engine.load_weights("/w/3", version=3)
        await engine.load_adapter("policy", "/lora/4", version=4)
        fake.gate = asyncio.Event()
        episodes = [
            asyncio.create_task(say(engine, session=str(n), seed=n, adapter="policy")) for n in range(6)
        ]
        await fake.until(6)

        await fake.stop()
        await fake.come_back()
        done = await asyncio.gather(*episodes)

        assert [len(each.token_ids) for each in done] == [4] * 6
        assert (fake.weights, fake.version) == ("/w/3", "agentenv-3")
        assert list(fake.adapters.values()) == ["/lora/4"]
        assert {each.version_ranges for each in done} == {((4, 0, 4),)}


async def test_weights_change_in_the_order_pause_update_reset_version_resume():
    async with serving() as fake, engine_on(fake) as engine:
        assert await engine.load_weights("/w/1") == 1

        order = [post.partition("?")[0] for post in fake.posts]
        assert order == ["/pause", "reload_weights", "/reset_prefix_cache", "agentenv-1", "/resume"]
        assert (await say(engine)).version_ranges == ((1, 0, 4),)


async def test_a_new_adapter_pauses_nothing_and_requests_in_flight_end_with_theirs():
    async with serving() as fake, engine_on(fake) as engine:
        await engine.load_adapter("policy", "/lora/1", version=1)
        fake.gate = asyncio.Event()
        began = asyncio.create_task(say(engine, adapter="policy"))
        await fake.until(1)

        await engine.load_adapter("policy", "/lora/2", version=2)
        begun = asyncio.create_task(say(engine, adapter="policy"))
        await fake.until(2)
        fake.gate.set()

        assert [(await one).version_ranges for one in (began, begun)] == [((1, 0, 4),), ((2, 0, 4),)]
        assert [fake.adapters[body["model"]] for body in fake.seen[-2:]] == ["/lora/1", "/lora/2"]
        assert fake.posts == []


async def test_a_server_that_cannot_be_paused_does_not_leave_the_others_frozen():
    async with serving() as fake, serving(pausable=False) as stubborn, engine_on(fake, stubborn) as engine:
        with pytest.raises(EngineError, match="/pause"):
            await engine.load_weights("/w/1")

        assert fake.posts.count("/resume") == 1
        assert (await say(engine)).version_ranges == ((0, 0, 4),)
        # It has those of the start, because the other one did not take the new ones.
        assert fake.weights == fake.model_path


async def test_a_server_that_is_away_during_an_update_gets_it_when_it_is_back():
    async with serving() as fake, engine_on(fake, retry_s=20) as engine:
        await fake.stop()
        update = asyncio.create_task(engine.load_weights("/w/2", version=2))
        await until(lambda: engine._pool.servers[0].problem)
        await fake.come_back()
        await update

        assert (fake.weights, fake.version) == ("/w/2", "agentenv-2")
        assert (await say(engine)).version_ranges == ((2, 0, 4),)


async def test_a_client_takes_over_the_version_that_a_server_names():
    async with serving() as fake:
        fake.version = "agentenv-12"
        async with engine_on(fake) as engine:
            assert engine.weights_version == 12
        fake.version = "of-somebody-else"
        async with engine_on(fake) as engine:
            assert engine.weights_version == 0


async def test_a_server_that_shares_our_files_is_not_given_weights_that_would_break_it(tmp_path):
    shape = {"model_type": "llama", "hidden_size": 8}
    for name, config in {"served": shape, "same": shape, "other": {**shape, "hidden_size": 9}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").touch()
    async with serving(model_path=str(tmp_path / "served")) as fake, engine_on(fake) as engine:
        with pytest.raises(EngineError, match="hidden_size is 9 and not 8; nothing was changed"):
            await engine.load_weights(tmp_path / "other")
        with pytest.raises(EngineError, match=r"no \*\.safetensors file; nothing was changed"):
            await engine.load_weights(tmp_path / "nowhere")
        assert fake.posts == []
        assert await engine.load_weights(tmp_path / "same") == 1


async def test_the_newest_version_of_an_adapter_is_asked_for_and_one_before_it_stays():
    async with serving() as fake, engine_on(fake) as engine:
        for version in (1, 2, 3):
            assert await engine.load_adapter("policy", f"/lora/{version}") == version

        await say(engine, adapter="policy")

        assert list(fake.adapters.values()) == ["/lora/2", "/lora/3"]
        assert fake.adapters[fake.seen[-1]["model"]] == "/lora/3"
        with pytest.raises(EngineError, match="no model other"):
            await say(engine, adapter="other")


async def test_the_base_model_can_be_asked_for_beside_a_loaded_adapter():
    async with serving() as fake, engine_on(fake) as engine:
        await engine.load_adapter("policy", "/lora/1")
        (named,) = fake.adapters
        opened = VLLMServerEngine(await asyncio.to_thread(probe, fake.url, model=named))
        fake.seen.clear()

        for each in (engine, opened):
            await say(each)
            await say(each, adapter=None)
        await opened.close()

        assert [body["model"] for body in fake.seen] == ["base", "base", named, "base"]


async def test_no_more_requests_are_in_flight_than_allowed():
    async with serving() as fake, engine_on(fake, concurrency=2) as engine:
        fake.gate = asyncio.Event()
        requests = [asyncio.create_task(say(engine, seed=n)) for n in range(7)]
        await fake.until(2)
        most = fake.running
        fake.gate.set()
        done = await asyncio.gather(*requests)

        assert most == 2
        assert len(done) == len(fake.seen) == 7


def test_a_closed_engine_serves_the_next_event_loop():
    fake = FakeVLLM()
    with in_a_thread(fake):
        engine = VLLMServerEngine(probe(fake.url))

        async def once():
            done = await say(engine)
            await engine.close()
            return done.token_ids

        assert asyncio.run(once()) == asyncio.run(once())


def test_the_report_names_the_flag_for_each_lack():
    report = ServerReport("u", "1", "m", None, None, "chat", "unknown", dev_mode=False, lora=False)

    said = " ".join(report.missing)

    for flag in ("processed_logprobs", "--enable-lora", "VLLM_SERVER_DEV_MODE=1"):
        assert flag in said


def test_many_processes_with_few_episodes_use_all_servers():
    urls = [f"http://server-{number}" for number in range(8)]
    used = Counter()
    for _ in range(64):
        pool = ServerPool(urls)
        used.update(pool._choose(f"episode-{number}").url for number in range(3))

    assert sorted(used) == urls
    assert max(used.values()) < 48


async def test_a_grammar_is_refused_and_not_ignored():
    async with serving() as fake, engine_on(fake) as engine:
        with pytest.raises(UsageError, match="cannot sample by a grammar"):
            await say(engine, grammar='start: "yes"')

        assert not fake.seen


@ROUTES
async def test_a_server_that_can_samples_by_a_grammar_whose_end_is_the_stop_token(route):
    async with serving(route=route, grammars=True) as fake, engine_on(fake) as engine:
        done = await say(engine, grammar="start: <[21]> other\nother: <[22]>", stop=(STOP,), max_tokens=8)

        assert engine.features.grammars
        assert (done.token_ids, done.finish_reason) == ((21, 22, STOP), "stop")
        (body,) = fake.seen
        asked = body.get("sampling_params", body)["structured_outputs"]
        assert asked == {
            "grammar": "start: until_end (<[7]>)\nuntil_end: <[21]> other\nother: <[22]>",
        }
        with pytest.raises(UsageError, match=r"cannot be followed: Expected token '\)'"):
            await say(engine, grammar="start: (", stop=(), max_tokens=8)


# The experts that vLLM tells are read from both routes, and from streams ------------------


@pytest.mark.parametrize(
    ("route", "streamed"), [("generate", False), ("generate", True), ("completions", False)]
)
async def test_a_server_tells_the_experts_of_all_tokens_but_the_last(route, streamed):
    async with serving(route=route, experts=True) as fake, engine_on(fake) as engine:
        assert engine.features.experts
        if streamed:
            drawn = Sampling(max_tokens=4, seed=0)
            done = await engine.stream((1, 2, 3), drawn, lambda _: None, stop_token_ids=())
        else:
            done = await say(engine)

    assert len(done.token_ids) == 4
    assert done.routed_experts.array().tolist() == experts_of(6).tolist()


async def test_a_server_that_tells_none_is_known_as_such():
    async with serving() as fake, engine_on(fake) as engine:
        assert not engine.features.experts
        assert (await say(engine)).routed_experts is None


async def test_experts_that_cannot_be_read_are_an_error_of_the_engine(monkeypatch):
    async with serving(experts=True) as fake, engine_on(fake) as engine:
        fake.told = lambda tokens: "no base64"
        with pytest.raises(EngineError, match="is not a completion"):
            await say(engine)


def test_wider_numbers_are_stored_in_two_bytes():
    file = io.BytesIO()
    np.save(file, np.full((4, 3, 2), 300, "int32"))

    routed = decode_experts(b64encode(file.getvalue()).decode())

    assert (routed.width, routed.array().max(), len(routed)) == (2, 300, 4)
    assert decode_experts(None) is None


# A server says how many tokens its cache holds, from which follows how many episodes it serves at once


BLOCKS = {"block_size": 16, "num_gpu_blocks": 40}


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (cache_metrics(BLOCKS), 640),
        # The engines of one server name the sum of their blocks each, but only their own tokens.
        (cache_metrics(BLOCKS, BLOCKS), 640),
        (cache_metrics(*[BLOCKS | {"kv_cache_size_tokens": 300}] * 2), 600),
        (cache_metrics(BLOCKS | {"kv_cache_size_tokens": None}), 640),
        (cache_metrics({"block_size": 16, "num_gpu_blocks": None}), None),
        (cache_metrics({}), None),
        ("<html>", None),
        ("", None),
    ],
)
async def test_the_probe_reads_the_size_of_the_cache_if_the_server_says_it(metrics, tokens):
    async with serving(metrics=metrics) as fake, engine_on(fake) as engine:
        assert engine.report.cache_tokens == tokens
        assert engine.features.episodes_at_once(64) == (None if tokens is None else tokens // 64)


async def test_every_server_serves_as_many_episodes_as_the_smallest_and_no_more_than_it_is_sent():
    large, small = cache_metrics(BLOCKS | {"num_gpu_blocks": 400}), cache_metrics(BLOCKS)
    async with (
        serving(metrics=large) as one,
        serving(metrics=small) as other,
        connected(one.url, other.url, concurrency=8) as engine,
    ):
        assert [engine.features.episodes_at_once(length) for length in (320, 64, 10_000)] == [4, 16, 2]


async def test_one_server_that_does_not_say_its_size_leaves_all_unknown():
    async with (
        serving(metrics=cache_metrics(BLOCKS)) as one,
        serving() as other,
        connected(one.url, other.url) as engine,
    ):
        assert engine.features.episodes_at_once(64) is None


# A vLLM server tells the tokens of a completion as they are sampled -----------------------


async def stream(engine, told, *, prompt=(1, 2, 3), **sampling):
    drawn = Sampling(**{"max_tokens": 6, "seed": 0} | sampling)
    return await engine.features.stream(prompt, drawn, told.append, stop_token_ids=(STOP,))


@ROUTES
async def test_a_streamed_completion_equals_a_plain_one(route):
    async with serving(route=route) as fake, engine_on(fake) as engine:
        told = []
        streamed = await stream(engine, told)
        plain = await say(engine, max_tokens=6, stop=(STOP,))

        assert [body.get("stream") for body in fake.seen] == [True, None]
    assert (streamed.token_ids, streamed.logprobs) == (plain.token_ids, plain.logprobs)
    assert (streamed.finish_reason, streamed.version_ranges) == (plain.finish_reason, plain.version_ranges)
    assert told == [[token] for token in streamed.token_ids]


@ROUTES
@pytest.mark.parametrize("streams", [False, None], ids=["ignored", "refused"])
async def test_a_server_that_cannot_stream_answers_plainly(route, streams):
    async with serving(route=route, streams=streams) as fake, engine_on(fake) as engine:
        told = []
        streamed = await stream(engine, told)

        assert streamed.token_ids == (await say(engine, max_tokens=6, stop=(STOP,))).token_ids
    assert told == []


async def test_a_stream_that_breaks_is_sampled_again_and_no_token_is_told_twice():
    async with serving() as fake, engine_on(fake, retry_s=30.0) as engine:
        fake.plan = ["breaks"]
        told = []
        streamed = await stream(engine, told)

        assert len(fake.sampled) == 2
    assert [token for part in told for token in part] == list(streamed.token_ids)


async def test_other_tokens_than_those_that_were_told_are_an_error():
    async with serving() as fake, engine_on(fake, retry_s=30.0) as engine:
        fake.plan = ["breaks"]
        with pytest.raises(EngineError, match="other tokens were sampled"):
            await stream(engine, [], seed=None, max_tokens=40)

        assert len(fake.sampled) == 2


@pytest.mark.parametrize(
    ("fault", "words"), [("fails", "out of memory"), ("no end", "in the middle of the completion")]
)
async def test_a_server_that_fails_in_mid_stream_is_told(fault, words):
    async with serving() as fake, engine_on(fake) as engine:
        fake.plan = [fault]
        told = []
        with pytest.raises(EngineError, match=words):
            await stream(engine, told)

        assert told
        assert len(fake.sampled) == 1


async def test_a_prompt_that_does_not_fit_is_not_asked_twice():
    async with serving() as fake, engine_on(fake) as engine:
        engine.max_context_tokens = None
        with pytest.raises(ContextTooLong):
            await stream(engine, [], prompt=range(80))

        assert len(fake.seen) == 1
