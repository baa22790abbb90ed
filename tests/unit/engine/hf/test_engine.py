"""The transformers engine against plain forward passes of tiny random models."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from random import Random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
)

from agentenv.core import ContextTooLong, EngineError, UsageError
from agentenv.engine import Completion, Sampling, TransformersEngine
from agentenv.engine.hf.request import GenerationRequest
from agentenv.render import byte_tokenizer
from helpers.waiting import wait_until

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=6),
    "qwen2_window": Qwen2Config(
        **{key: value for key, value in SHAPE.items() if key != "head_dim"},
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
}


def build(config=FAMILIES["llama"], seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # far from uniform, so that an error shows
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def engine(model, make):
    return make(model)


def expected_logprobs(model, prompt, completion: Completion, temperature=1.0):
    """Score a completion with one unpadded forward pass without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits[0]
    scaled = (logits.double() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return scaled.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()


def prompt_of(length, seed=0):
    return [(seed * 37 + 11 * index + index * index) % 299 for index in range(length)]


async def say(engine, prompt, *, stop=(), stop_strings=(), session=None, deadline_s=None, **sampling):
    return await engine.generate(
        prompt,
        Sampling(**{"max_tokens": 12, "seed": 0, "stop": stop_strings} | sampling),
        stop_token_ids=stop,
        session_id=session,
        deadline_s=deadline_s,
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_of_ragged_joining_episodes_equal_a_fresh_forward_pass(family, make):
    model = build(FAMILIES[family])
    engine = make(model, max_batch=3)
    worst = 0.0

    async def episode(number):
        nonlocal worst
        prompt = prompt_of(3 + 5 * number, number)
        for turn in range(3):
            done = await say(
                engine, prompt, session=str(number), seed=number * 7 + turn, max_tokens=4 + number
            )
            want = expected_logprobs(model, prompt, done)
            worst = max(worst, *(abs(a - b) for a, b in zip(done.logprobs, want, strict=True)))
            prompt = [*prompt, *done.token_ids, *prompt_of(3, turn)]

    await asyncio.gather(*map(episode, range(6)))

    assert worst < 1e-5
    assert engine.stats()["reused"] > 0


async def test_tokens_are_told_as_they_are_sampled(engine):
    loop, told = asyncio.get_running_loop(), []

    def tell(tokens):
        assert asyncio.get_running_loop() is loop
        told.append((tokens, asking.done()))

    asked = Sampling(max_tokens=8, seed=3)
    asking = asyncio.create_task(engine.features.stream(prompt_of(9), asked, tell, stop_token_ids=()))
    done, plain = await asyncio.gather(asking, say(engine, prompt_of(9), max_tokens=8, seed=3))

    assert told == [((token,), False) for token in done.token_ids]
    assert (done.token_ids, len(done.logprobs)) == (plain.token_ids, 8)


@pytest.mark.parametrize("temperature", [0.5, 1.7, 0.0])
async def test_logprobs_are_those_at_the_sampling_temperature_and_greedy_takes_the_likeliest(
    engine, model, temperature
):
    prompt = prompt_of(9)

    done = await say(engine, prompt, temperature=temperature)

    expected = expected_logprobs(model, prompt, done, temperature or 1.0)
    assert done.logprobs == pytest.approx(expected, abs=1e-5)
    if not temperature:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *done.token_ids]]), use_cache=False).logits[0]
        assert list(done.token_ids) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


async def test_a_seeded_request_does_not_depend_on_its_batch_mates(engine):
    prompt = prompt_of(8)
    alone = await say(engine, prompt, seed=5)

    others = [say(engine, prompt_of(4 + mate, mate), seed=mate, max_tokens=3 * mate + 1) for mate in range(8)]
    together, *_ = await asyncio.gather(say(engine, prompt, seed=5), *others)

    assert together.token_ids == alone.token_ids
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


async def test_the_stop_token_stays_and_ends_the_completion(engine):
    free = await say(engine, prompt_of(6), seed=3)
    stop = free.token_ids[4]

    done = await say(engine, prompt_of(6), seed=3, stop=(stop,))

    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(done.logprobs) == len(done.token_ids)


async def test_length_ends_a_completion_and_the_context_limit_shortens_it(model, make):
    engine = make(model, max_context_tokens=20)

    done = await say(engine, prompt_of(15), max_tokens=50)

    assert (done.finish_reason, len(done.token_ids)) == ("length", 5)
    with pytest.raises(ContextTooLong, match="20 tokens, and hf takes 20"):
        await say(engine, prompt_of(20))


@pytest.mark.parametrize(
    ("prompt", "asked", "said"),
    [
        ([], {}, "empty"),
        ([1, 300], {}, "token id 300"),
        ([-1], {}, "token id -1"),
        ([1], {"adapter": "x"}, "no adapter 'x'"),
        ([1], {"stop_strings": ("END",)}, "no tokenizer"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_with_the_reason(engine, prompt, asked, said):
    with pytest.raises(UsageError, match=said):
        await say(engine, prompt, **asked)


async def test_a_deadline_that_has_passed_aborts_with_what_was_sampled(engine):
    done = await say(engine, prompt_of(5), deadline_s=0.0)

    assert (done.finish_reason, done.token_ids) == ("abort", ())


async def test_a_cancelled_request_leaves_the_batch_and_nothing_is_kept_of_its_released_episode(model, make):
    engine = make(model)
    endless = asyncio.create_task(say(engine, prompt_of(5), max_tokens=600, session="a"))
    await say(engine, prompt_of(6), max_tokens=2)

    endless.cancel()
    await asyncio.gather(endless, return_exceptions=True)
    await engine.release("a")
    for _ in range(2):
        await say(engine, prompt_of(7), max_tokens=2)

    assert engine.stats()["decoded"] < 600
    assert engine.stats()["kept_rows"] == 0


async def test_tokens_carry_the_version_that_sampled_them_across_an_update(make):
    model = build(seed=1)
    engine = make(model)
    other = build(seed=2).state_dict()
    prompt = prompt_of(6)
    request = asyncio.create_task(say(engine, prompt, max_tokens=600, session="a"))

    def update():
        wait_until(lambda: engine.stats()["decoded"] >= 5)
        with engine.updating():
            model.load_state_dict(other)

    await asyncio.to_thread(update)
    done = await request

    (first, _, cut), (second, start, end) = done.version_ranges
    assert (first, second, start, end) == (0, 1, cut, 600)
    want = expected_logprobs(model, prompt, done)
    assert done.logprobs[cut:] == pytest.approx(want[cut:], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(done.logprobs[:cut], want[:cut], strict=True)) > 1e-2


async def test_nothing_kept_is_used_after_the_weights_changed(make):
    model = build(seed=3)
    engine = make(model)
    prompt = prompt_of(12)
    first = await say(engine, prompt, session="a")
    model.load_state_dict(build(seed=4).state_dict())
    assert engine.weights_updated() == 1
    longer = [*prompt, *first.token_ids, 5, 6]

    done = await say(engine, longer, session="a")

    assert done.version_ranges == ((1, 0, 12),)
    assert done.logprobs == pytest.approx(expected_logprobs(model, longer, done), abs=1e-5)


async def test_requests_over_the_batch_limits_wait_and_all_finish(model, make):
    engine = make(model, max_batch=2, live_tokens=40)

    done = await asyncio.gather(*(say(engine, prompt_of(10, number), seed=number) for number in range(7)))

    assert [len(each.token_ids) for each in done] == [12] * 7
    assert max(each.queue_s for each in done) > 0


async def test_a_failing_forward_pass_fails_all_requests_and_not_the_engine(make):
    model = build()
    engine = make(model)
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(3, 3))
    prompts = [prompt_of(5), prompt_of(5), prompt_of(200, 1), prompt_of(4, 2)]

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(say(engine, prompt) for prompt in prompts), return_exceptions=True)
    model.lm_head.weight = weight

    assert [type(answer) for answer in answers] == [EngineError] * 4
    assert all("RuntimeError" in answer.message for answer in answers)
    assert len((await say(engine, prompt_of(5))).token_ids) == 12


async def test_a_prompt_that_cannot_be_prefilled_ends_none_of_those_in_its_pass(model, make):
    engine, widths = make(model), list[int]()
    reached, submitted = threading.Event(), threading.Event()

    def refuse(_, inputs):
        widths.append(len(inputs[0]))
        reached.set()
        submitted.wait()
        if (inputs[0] == 299).any():
            raise RuntimeError("299 is refused")

    hook = model.model.embed_tokens.register_forward_pre_hook(refuse)
    prompts = [prompt_of(20, number) for number in range(5)]
    before = asyncio.create_task(say(engine, prompt_of(5), max_tokens=1))
    await asyncio.to_thread(reached.wait)
    together = [asyncio.create_task(say(engine, prompt)) for prompt in ([*prompt_of(19), 299], *prompts)]
    await asyncio.sleep(0)
    submitted.set()
    answers = await asyncio.gather(*together, return_exceptions=True)
    await before
    hook.remove()

    assert widths[:2] == [1, 6], "they were in one pass"
    assert isinstance(answers[0], EngineError)
    for prompt, each in zip(prompts, answers[1:], strict=True):
        assert isinstance(each, Completion)
        assert each.logprobs == pytest.approx(expected_logprobs(model, prompt, each), abs=1e-5)
    assert widths[-1] == 5, "they decode together again"


async def test_a_row_that_cannot_be_decoded_ends_none_of_those_beside_it(model, make):
    engine = make(model)
    truth = [await say(engine, prompt_of(10, number), seed=number) for number in range(5)]
    token = next(
        one for one in truth[2].token_ids[3:] if all(one not in each.token_ids for each in truth[:2])
    )

    def refuse(_, inputs):
        if (inputs[0] == token).any():
            raise RuntimeError("refused")

    hook = model.model.embed_tokens.register_forward_pre_hook(refuse)
    answers = await asyncio.gather(
        *(say(engine, prompt_of(10, number), seed=number) for number in range(5)), return_exceptions=True
    )
    hook.remove()

    refused = [number for number, each in enumerate(truth) if token in each.token_ids[:-1]]
    assert [number for number, each in enumerate(answers) if isinstance(each, EngineError)] == refused
    for each, wanted in zip(answers, truth, strict=True):
        if isinstance(each, Completion):
            assert each.token_ids == wanted.token_ids
            assert each.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


async def test_a_batch_for_which_the_memory_is_too_small_is_sampled_row_by_row(model, make):
    engine, passes = make(model), 0

    def refuse(_, inputs):
        nonlocal passes
        passes += 1
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("too many rows")

    hook = model.model.embed_tokens.register_forward_pre_hook(refuse)
    prompts = [prompt_of(10, number) for number in range(4)]
    done = await asyncio.gather(*(say(engine, prompt, max_tokens=40) for prompt in prompts))
    hook.remove()

    assert passes < 4 * 40 + 4 * 8 + 16, "rows are prefilled again ever more rarely"
    for prompt, each in zip(prompts, done, strict=True):
        assert each.logprobs == pytest.approx(expected_logprobs(model, prompt, each), abs=1e-5)


async def test_a_request_whose_numbers_are_not_finite_spoils_no_other(make):
    model = build()
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = math.nan
    engine = make(model)
    endless = asyncio.create_task(say(engine, prompt_of(15), max_tokens=1000))
    await say(engine, prompt_of(3), max_tokens=1)

    with pytest.raises(EngineError, match="finite"):
        await say(engine, [*prompt_of(30), 299])
    after = await asyncio.gather(*(say(engine, prompt_of(size), max_tokens=1) for size in (4, 5, 6)))

    assert not endless.done()  # or the memory would have been given back in between
    assert all(math.isfinite(one.logprobs[0]) for one in after)
    endless.cancel()


@pytest.mark.parametrize("how", ["released", "closed"])
async def test_what_is_kept_is_freed_also_where_no_request_follows(model, monkeypatch, make, how):
    monkeypatch.setattr("agentenv.engine.hf.engine.LINGER_S", 0.2)
    engine = make(model)
    await say(engine, prompt_of(20), session="a")
    assert engine.stats()["kept_rows"] == 1

    worker = engine._worker
    if how == "released":
        await engine.release("a")
    await asyncio.to_thread(worker.join, 60)
    if how == "closed":
        assert engine.stats()["kept_bytes"] > 0
        await engine.close()

    assert (engine.stats()["kept_rows"], engine.stats()["kept_bytes"]) == (0, 0)


async def test_a_failed_update_of_the_weights_does_not_leave_the_engine_paused(model, make):
    engine = make(model)

    with pytest.raises(ZeroDivisionError), engine.updating(lambda: 1 // 0):
        pass

    async with asyncio.timeout(60):
        assert len((await say(engine, prompt_of(5))).token_ids) == 12


def test_an_answer_to_an_event_loop_that_was_just_closed_is_dropped(monkeypatch):
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    request = GenerationRequest([1], Sampling(), frozenset(), 1, Random(0), loop, future)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "is_closed", lambda: False)  # as the worker saw it a moment before
        request.fail(EngineError("too late"))

    assert not future.done()


async def test_eager_attention_stays_for_it_has_what_sdpa_leaves_out(make):
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, sliding_window=6, attn_logit_softcapping=0.5, query_pre_attn_scalar=1)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    prompt = prompt_of(20)
    with torch.no_grad():
        before = model(input_ids=torch.tensor([prompt]), use_cache=False).logits
    engine = make(model)

    done = await say(engine, prompt)

    with torch.no_grad():
        after = model(input_ids=torch.tensor([prompt]), use_cache=False).logits
    torch.testing.assert_close(after, before)
    assert done.logprobs == pytest.approx(expected_logprobs(model, prompt, done), abs=1e-5)


async def test_a_closed_engine_refuses_and_frees_its_thread(model, make):
    engine = make(model, name="hf:closing")
    request = asyncio.create_task(say(engine, prompt_of(5), max_tokens=600))
    await say(engine, prompt_of(5), max_tokens=1)

    await engine.close()
    await engine.close()

    with pytest.raises(EngineError, match="closed"):
        await request
    with pytest.raises(EngineError, match="closed"):
        await say(engine, prompt_of(5))
    assert not [thread for thread in threading.enumerate() if "hf:closing" in thread.name]


async def test_a_model_in_training_mode_samples_as_in_evaluation(model, engine):
    want = await say(engine, prompt_of(5), seed=9)
    model.train()

    got = await say(engine, prompt_of(5), seed=9)

    assert (got.finish_reason, got.version_ranges) == ("length", ((0, 0, 12),))
    assert got.token_ids == want.token_ids


def test_a_model_with_convolution_layers_is_refused_in_words():
    config = Lfm2Config(
        **{key: value for key, value in SHAPE.items() if key != "head_dim"},
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(UsageError, match="'lfm2' has conv"):
        TransformersEngine(AutoModelForCausalLM.from_config(config))


SMALL = {"vocab_size": 61, "hidden_size": 32}
UNTAKEN = {
    "Bloom": BloomConfig(**SMALL, n_layer=2, n_head=4),
    "Falcon": FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4, alibi=True),
    "RecurrentGemma": RecurrentGemmaConfig(
        **SMALL, num_hidden_layers=3, intermediate_size=48, num_attention_heads=4, attention_window_size=32
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNTAKEN)
def test_a_model_whose_attention_takes_no_kept_rows_is_refused_in_words(name):
    model = AutoModelForCausalLM.from_config(UNTAKEN[name])

    with pytest.raises(UsageError, match=f"{name}ForCausalLM does not take rows .* use vllm:"):
        TransformersEngine(model)


@pytest.mark.slow
def test_a_process_that_ends_in_mid_generation_ends_cleanly():
    program = """
import atexit, threading, time

def report():
    print("left:", [thread.name for thread in threading.enumerate() if "agentenv-hf" in thread.name])

atexit.register(report)  # before the engine's module, so it runs after what that one registers

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from agentenv.core.loops import run_sync
from agentenv.engine import Sampling
from agentenv.engine.hf import TransformersEngine

config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=100_000)
engine = TransformersEngine(AutoModelForCausalLM.from_config(config))
endless = engine.generate([1, 2, 3], Sampling(max_tokens=90_000), stop_token_ids=[])
threading.Thread(target=run_sync, args=(endless,), daemon=True).start()
while not engine.stats()["decoded"]:
    time.sleep(0.01)
print("decoding")
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "decoding\nleft: []\n"), ended.stderr


async def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(model, make):
    tokenizer = byte_tokenizer()
    engine = make(model, tokenizer)
    prompt = prompt_of(9)
    free = await say(engine, prompt, max_tokens=20)
    third = tokenizer.decode(free.token_ids[:6])[-2:]

    done = await say(engine, prompt, max_tokens=20, stop_strings=(third,))

    size = len(done.token_ids)
    assert done.finish_reason == "stop"
    assert (done.token_ids, done.logprobs) == (free.token_ids[:size], pytest.approx(free.logprobs[:size]))
    assert third in tokenizer.decode(done.token_ids)
    assert third not in tokenizer.decode(done.token_ids[:-1])
