"""Images through a vLLM server: one placeholder each, files beside it, and the returned ids compared."""

import pytest

from agentenv.core import EngineError, SequenceBuilder, UsageError
from agentenv.core.images import hash_of, image_file, image_size
from agentenv.engine import Sampling
from agentenv.render import Renderer
from helpers.fake_vllm import engine_on, serving
from helpers.seeing import part, png, text, tokenizer_of

A, B = png(1, 96, 64), png(2, 64, 112)


def counts(rule):
    def tokens_of(url):
        return rule.prepare(*image_size(image_file(url))).ids.count(rule.image_id)

    return tokens_of


def prompt_of(tokenizer):
    builder = SequenceBuilder()
    said = [text("a "), part(A), text(" b "), part(B), text("?")]
    builder.append("prompt", Renderer(tokenizer).start([{"role": "user", "content": said}]))
    return builder


async def ask(engine, builder, **more):
    return await engine.generate(
        builder.token_ids, Sampling(max_tokens=4, seed=0), stop_token_ids=(), images=builder.images, **more
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
async def test_the_server_gets_collapsed_ids_and_files_and_its_ids_are_ours(family):
    tokenizer = tokenizer_of(family)
    rule, builder = tokenizer.images, prompt_of(tokenizer)
    async with (
        serving(max_model_len=999, placeholder=rule.image_id, tokens_of=counts(rule)) as fake,
        engine_on(fake) as engine,
    ):
        engine.see(rule)
        done = await ask(engine, builder)

        sent = fake.seen[0]
        assert sent["token_ids"].count(rule.image_id) == 2
        assert len(sent["token_ids"]) < len(builder.token_ids)
        assert [hash_of(image_file(one["url"])) for one in sent["content_parts"]] == [hash_of(A), hash_of(B)]
        assert len({one["uuid"] for one in sent["content_parts"]}) == 2
        biases = sent["sampling_params"]["logit_bias"]
        assert biases == {str(token): -100.0 for token in rule.banned_ids}
        assert len(done.token_ids) == 4


@pytest.mark.parametrize("lie", [1, -1, None])
async def test_a_server_that_made_other_tokens_is_an_error(lie):
    tokenizer = tokenizer_of("qwen3_vl")
    rule, builder = tokenizer.images, prompt_of(tokenizer)

    def made(url):
        return counts(rule)(url) + (lie or 0)

    async with (
        serving(max_model_len=999, placeholder=rule.image_id, tokens_of=made) as fake,
        engine_on(fake) as engine,
    ):
        engine.see(rule)
        fake.tells_prompt = lie is not None
        with pytest.raises(EngineError, match="did not say" if lie is None else "tokens of a prompt of"):
            await ask(engine, builder)


async def test_a_placeholder_without_an_image_never_reaches_a_server():
    tokenizer = tokenizer_of("qwen3_vl")
    rule, builder = tokenizer.images, prompt_of(tokenizer)
    async with (
        serving(max_model_len=999, placeholder=rule.image_id, tokens_of=counts(rule)) as fake,
        engine_on(fake) as engine,
    ):
        engine.see(rule)
        with pytest.raises(UsageError, match="without an image"):
            await engine.generate(builder.token_ids, Sampling(), stop_token_ids=())
        assert fake.seen == []


async def test_gemma_3_and_the_older_route_are_refused():
    for family, route in (("gemma3", "generate"), ("qwen3_vl", "completions")):
        tokenizer = tokenizer_of(family)
        async with serving(route=route, max_model_len=999) as fake, engine_on(fake) as engine:
            engine.see(tokenizer.images)
            assert not engine.features.images
            with pytest.raises(UsageError, match="cannot be shown images"):
                await ask(engine, prompt_of(tokenizer))
