"""The transformers engine inside a grammar, against masked softmaxes of plain forward passes."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from agentenv.core import UsageError
from agentenv.engine import Sampling
from agentenv.render import byte_tokenizer
from unit.engine.hf.test_engine import build

pytest.importorskip("llguidance")

TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_id("<|im_end|>")
COLOUR = 'start: "red" | "green" | "grey"'
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def engine(model, make):
    return make(model, TOKENIZER)


async def say(engine, grammar, seed=0, **sampling):
    asked = Sampling(**{"grammar": grammar, "max_tokens": 60, "seed": seed} | sampling)
    done = await engine.generate([1, 2, 3], asked, stop_token_ids=(END,))
    return done, TOKENIZER.decode(done.token_ids).removesuffix("<|im_end|>")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_completions_follow_the_grammar_and_end_with_a_stop_token(engine, temperature):
    done = await asyncio.gather(*(say(engine, COLOUR, seed, temperature=temperature) for seed in range(24)))

    texts = {text for _, text in done}
    assert texts <= {"red", "green", "grey"}
    assert len(texts) > 1 or not temperature
    assert all(one.finish_reason == "stop" and one.token_ids[-1] == END for one, _ in done)


async def test_a_schema_gives_json_of_that_schema(engine):
    grammar = f"start: %json {json.dumps(SCHEMA)}"

    for _, text in await asyncio.gather(*(say(engine, grammar, seed) for seed in range(24))):
        value = json.loads(text)
        assert value["colour"] in {"red", "green"}
        assert value["size"] <= 99


async def test_logprobs_and_supports_are_those_of_a_masked_softmax(model, engine):
    done, text = await say(engine, COLOUR, temperature=0.7, top_k=50, keep_support=True)

    allowed = [
        sorted({word[len(text[:at])] for word in ("red", "green", "grey") if word.startswith(text[:at])})
        for at in range(len(text))
    ]
    supports = [sorted(map(ord, letters)) for letters in allowed] + [[END]]
    assert done.supports is not None
    assert done.supports.tolist() == supports
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor([[1, 2, 3, *done.token_ids]]), use_cache=False).logits[0].double()
        )
    for place, (token, logprob, support) in enumerate(
        zip(done.token_ids, done.logprobs, supports, strict=True), start=2
    ):
        among = (logits[place, support] / 0.7).log_softmax(-1)
        assert logprob == pytest.approx(float(among[support.index(token)]), abs=1e-5)


async def test_other_requests_of_the_batch_are_not_masked(engine):
    alone = await engine.generate([5, 6], Sampling(max_tokens=8, seed=1), stop_token_ids=())

    together, *_ = await asyncio.gather(
        engine.generate([5, 6], Sampling(max_tokens=8, seed=1), stop_token_ids=()),
        *(say(engine, COLOUR, seed) for seed in range(3)),
    )

    assert together.token_ids == alone.token_ids


async def test_without_top_k_a_completion_has_no_supports_and_says_why(engine):
    done, _ = await say(engine, COLOUR, keep_support=True)

    assert done.supports is None
    assert "top_k" in done.unfit_for_training(Sampling(grammar=COLOUR, keep_support=True))


async def test_a_grammar_goes_on_after_new_weights(engine):
    asking = asyncio.ensure_future(say(engine, 'start: "a" /b{30}/ "c"'))
    await asyncio.sleep(0)

    with engine.updating():
        pass

    assert (await asking)[1] == "a" + "b" * 30 + "c"


@pytest.mark.parametrize("grammar", ["start: nothing", "start: %json {", 'start: "a" ['])
async def test_a_grammar_that_cannot_be_read_is_refused(engine, grammar):
    with pytest.raises(UsageError, match="grammar"):
        await say(engine, grammar)


async def test_a_grammar_needs_a_tokenizer_and_stop_tokens(model, engine, make):
    with pytest.raises(UsageError, match="stop tokens"):
        await engine.generate([1], Sampling(grammar=COLOUR), stop_token_ids=())
    with pytest.raises(UsageError, match="no tokenizer"):
        await say(make(model), COLOUR)


async def test_control_tokens_are_named_by_their_ids_and_are_no_text(engine):
    opens = TOKENIZER.token_id("<tool_call>")

    named, _ = await say(engine, f"start: <[{opens}]>")
    texts = await asyncio.gather(*(say(engine, "start: /(.|\\n)*/", seed) for seed in range(8)))

    assert named.token_ids == (opens, END)
    assert all(token < 256 for done, _ in texts for token in done.token_ids if token != END)
