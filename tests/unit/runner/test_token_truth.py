"""Token truth: what was sampled or sent stays as it was, and reads as the template would write it."""

from __future__ import annotations

import json
from dataclasses import replace

import jinja2.sandbox
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentenv.core import Supports, Trajectory
from agentenv.engine import Completion, Features, Sampling, ScriptedEngine
from agentenv.engine.exact import faulty_ids, padded
from agentenv.render import ChatTokenizer, Renderer
from agentenv.runs import verify_episode
from agentenv.testing import tool_call
from scenes import TOKENIZER, Tools, groups_of, play, runner


def rendered(template: str, record: Trajectory) -> str:
    """Render the whole conversation from its messages, by Jinja alone."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps  # Jinja's own escapes HTML; transformers replaces it too
    messages = json.loads(json.dumps(record.messages))
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    return environment.from_string(template).render(
        messages=messages, tools=record.tools, add_generation_prompt=False
    )


async def test_control_strings_of_a_tool_never_become_control_tokens():
    escaped = r'<tool_call>{"name": "echo", "arguments": {"text": "x<\u007cim_end|>y"}}</tool_call>'
    record = await play(Tools(), [escaped, "done"])

    assert record.turns[0].tool_results[0].text == "x<|im_end|>y"
    sequence = record.sequences[0]
    env = [span for span in sequence.spans if span.source == "env"]
    assert [list(span.token_ids).count(258) for span in env] == [1]


def merging_tokenizer() -> ChatTokenizer:
    """Bytes, and one merge that encoding always takes: `he` + `llo` is written `hello`."""
    base = json.loads(TOKENIZER.backend.to_str())
    vocabulary = base["model"]["vocab"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    vocabulary |= {left + right: 300 + number for number, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for token in base["added_tokens"]:
        backend.add_tokens([AddedToken(token["content"], special=token["special"], normalized=False)])
    known = {"chat_template": TOKENIZER.chat_template, "special_tokens": TOKENIZER.special_tokens}
    return ChatTokenizer(backend, **known, name="merging")


async def test_a_sample_that_encodes_otherwise_is_kept_as_sampled():
    tokenizer = merging_tokenizer()
    renderer = Renderer(tokenizer)
    he, llo, hello = (tokenizer.token_id(part) for part in ("he", "llo", "hello"))
    stop = renderer.stop_token_ids[0]
    odd = [*tokenizer.encode('<tool_call>{"name": "echo", "arguments": {"text": "'), he, llo]
    odd += [*tokenizer.encode('"}}</tool_call>'), stop]
    assert tokenizer.encode("hello") == [hello]

    playing = runner([odd, "done"], renderer=renderer)
    record = await playing.run_episode(Tools(), {})

    first = record.turns[0]
    assert record.sequences[0].token_ids[first.start : first.end] == odd
    assert list(playing.engine.requests[1].prompt_ids[first.start : first.end]) == odd
    assert tokenizer.encode(tokenizer.decode(odd)) != odd
    assert first.tool_results[0].text == "hello"
    found = verify_episode(record, renderer, drift="off")
    assert [(one.check, one.turn) for one in found.findings] == [("tokenisation", 0)]


async def test_a_template_that_drops_thinking_changes_nothing_that_was_sampled():
    drops = TOKENIZER.chat_template.replace(
        "if message.reasoning_content", "if message.reasoning_content and loop.last"
    )
    renderer = Renderer(TOKENIZER, chat_template=drops)
    thinking = "<think>why not</think>" + tool_call("echo", text="a")

    playing = runner([thinking, "done"], renderer=renderer)
    record = await playing.run_episode(Tools(), {})

    assert len(record.sequences) == 1
    sampled = [*TOKENIZER.encode(thinking), 258]
    first = record.turns[0]
    assert list(playing.engine.requests[1].prompt_ids[first.start : first.end]) == sampled
    assert "<think>" not in rendered(drops, record)
    assert "<think>why not</think>" in renderer.decode(record.sequences[0].token_ids)


class Raw(ScriptedEngine):
    """Answers with completions as they are given, well-formed or not."""

    def __init__(self, *completions):
        super().__init__([])
        self.completions = completions

    async def generate(self, prompt_ids, sampling, **request):
        self.requests.append(tuple(prompt_ids))
        return self.completions[len(self.requests) - 1]


def said(ids, reason="stop", *more, **named) -> Completion:
    """A completion of tokens that are all equally likely."""
    return Completion(tuple(ids), (-0.5,) * len(ids), reason, *more, **named)


GOOD = (*TOKENIZER.encode(tool_call("echo", text="a")), 258)


@pytest.mark.parametrize(
    "logprobs",
    [
        *((-0.1,) * count for count in (0, 1, 4)),
        *((odd, -0.1, -0.1) for odd in (None, float("nan"), 0.3, float("-inf"))),
    ],
    ids=str,
)
async def test_a_completion_without_exact_logprobs_aborts(logprobs):
    playing = runner(Raw(*[said(GOOD), Completion((104, 105, 258), logprobs, "stop")] * 3), retries=2)

    ((record,),) = await groups_of(playing, Tools)

    assert (record.stop_reason, record.error.boundary, record.trainable) == ("aborted", "engine", False)
    assert "logprob" in record.error.message
    assert (len(playing.engine.requests), playing.ledger.retried) == (6, 2)
    assert (len(record.turns), record.reward) == (1, None)
    assert record.sequences[0].num_trained_tokens == len(GOOD)


@pytest.mark.parametrize(
    ("ids", "reason", "told"),
    [
        ((104, 5000, 258), "stop", "token id 5000, which is outside the vocabulary"),
        ((104, -1, 258), "stop", "token id -1, which is outside the vocabulary"),
        ((104, True, 258), "stop", "token 1 as True, a bool and not an integer"),
        ((104, 258, 105, 106), "length", "2 tokens after the stop token 258"),
        ((104, 105), "stop", "'stop' after token 105, which is not a stop token"),
        ((104,) * 21, "length", "21 tokens, but at most 20 were asked for"),
    ],
    ids=["outside", "negative", "boolean", "after-stop", "no-stop", "too-many"],
)
async def test_tokens_that_the_policy_cannot_have_sampled_abort(ids, reason, told):
    record = await play(Tools(), Raw(said(ids, reason)), max_tokens_per_turn=20)

    assert (record.stop_reason, record.error.boundary) == ("aborted", "engine")
    assert told in record.error.message
    assert not any(record.sequences[0].loss_mask)


@pytest.mark.parametrize(
    ("limit", "asked", "sampled"),
    [
        (4096, {}, 3001),
        (100, {}, 100),
        (None, {}, 1024),
        (4096, {"max_tokens": 1024}, 1024),
        (4096, {"max_tokens": 200}, 200),
    ],
)
async def test_a_turn_has_as_many_tokens_as_its_limit_says_unless_the_sampling_asks_for_fewer(
    limit, asked, sampled
):
    record = await play(Tools(), ["x" * 3000], max_tokens_per_turn=limit, sampling=Sampling(**asked))

    assert sum(record.sequences[0].loss_mask) == sampled


async def test_a_stop_string_ends_a_turn_and_its_tokens_stay_as_sampled():
    script = [tool_call("echo", text="hi") + " and more", "done"]

    record = await play(Tools(), script, sampling=Sampling(stop=["</tool_call>"]))

    assert record.stop_reason == "final_answer"
    assert [result.content for result in record.turns[0].tool_results] == ["hi"]
    sampled = record.sequences[0].token_ids[record.turns[0].start : record.turns[0].end]
    assert TOKENIZER.decode(sampled) == tool_call("echo", text="hi")
    assert record.turns[0].finish_reason == "stop"
    assert record.turns[0].sampling["stop"] == ["</tool_call>"]
    assert record.trainable


@pytest.mark.parametrize(
    ("ids", "reason", "told"),
    [
        ((104, 105, 106), "stop", "has no stop string"),
        ((104, 33, 105, 258), "stop", "tokens after the stop string '!'"),
        ((104, 33, 105), "length", "tokens after the stop string '!'"),
        ((104, 33), "stop", ""),
        ((104, 105, 258), "stop", ""),
    ],
    ids=["none", "ended-later", "cut-later", "stop-string", "stop-token"],
)
async def test_a_completion_that_does_not_end_at_its_stop_string_aborts(ids, reason, told):
    record = await play(Tools(), Raw(said(ids, reason)), sampling=Sampling(stop=("!",)))

    assert (record.stop_reason == "aborted") == bool(told)
    assert told in (record.error.message if record.error else "")


@pytest.mark.parametrize(("limit", "accepted"), [(None, False), (5000, False), (5001, True)])
async def test_the_vocabulary_of_the_model_is_what_its_engine_says(limit, accepted):
    record = await play(Tools(), Raw(said((104, 5000, 258), vocab_size=limit)))

    assert (record.stop_reason == "final_answer") == accepted
    assert any(record.sequences[0].loss_mask) == accepted


def test_ids_in_the_padding_of_a_models_vocabulary_are_accepted():
    assert faulty_ids([258, 151_900], padded(151_665)) == ""
    assert faulty_ids([258, 200_000], padded(151_665))


@pytest.mark.parametrize(
    ("completion", "ended", "told", "sampled"),
    [
        (Completion((), (), "stop"), "aborted", "", 0),  # no tokens at all, which are never the prompt
        (said([258]), "final_answer", "", 1),  # an empty answer, and not truncated
        (said((104, 258)), "final_answer", "", 2),
        # Truncation is what the engine says, and not what the last token is.
        (said((104, 258), "length"), "generation_length", "", 2),
        (said([104], "content_filter"), "aborted", "content_filter", 0),
    ],
    ids=["nothing", "empty", "stop", "length", "unknown"],
)
async def test_how_a_turn_ended_is_what_the_engine_says(completion, ended, told, sampled):
    record = await play(Tools(), Raw(completion))

    assert (record.stop_reason, record.truncated) == (ended, ended == "generation_length")
    assert told in (record.error.message if record.error else "")
    assert record.num_sampled_tokens == sum(record.sequences[0].loss_mask) == sampled
    assert len(record.turns) == bool(sampled)


async def test_tokens_of_another_model_are_recorded_and_never_trained():
    other, own = Completion(GOOD, (), "stop", sampled_by_policy=False), said((104, 258))

    record = await play(Tools(), Raw(other, own))
    foreign = await play(Tools(), Raw(Completion((104, 258), (), "stop", sampled_by_policy=False)))

    assert [span.source for span in record.sequences[0].spans] == ["prompt", "other", "env", "model"]
    assert record.trainable
    assert sum(record.sequences[0].loss_mask) == 2
    assert not foreign.trainable
    assert "policy" in foreign.untrainable_reason


async def test_greedy_and_cut_sampling_are_not_trainable_and_say_why():
    greedy = await play(Tools(), sampling=Sampling(temperature=0))
    cut = await play(Tools(), sampling=Sampling(top_p=0.9))

    assert "temperature 0" in greedy.untrainable_reason
    assert "top_p" in cut.untrainable_reason
    assert "keep_support" in cut.untrainable_reason
    assert greedy.turns[0].sampling["temperature"] == 0


SAID = (104, 258)


async def test_a_cut_distribution_is_trainable_exactly_if_its_supports_are_recorded():
    asked = Sampling(top_k=5, keep_support=True)
    kept = Supports.of([{token, 3} for token in SAID])
    whole = said(SAID, supports=kept)
    large = replace(whole, supports=None, no_supports="left 9999 tokens: set top_k")

    cases = (whole, large, replace(whole, supports=None))
    records = [await play(Tools(), Raw(one), sampling=asked) for one in cases]

    assert [span.supports for span in records[0].sequences[0].spans] == [None, kept]
    assert [record.trainable for record in records] == [True, False, False]
    assert records[1].untrainable_reason == large.no_supports
    assert "does not return its supports" in records[2].untrainable_reason
    assert all(record.sequences[0].num_trained_tokens == len(SAID) for record in records)


async def test_a_support_beyond_the_vocabulary_is_refused():
    kept = Supports.of([{token, 99_999} for token in SAID])

    record = await play(Tools(), Raw(said(SAID, supports=kept)), sampling=Sampling(top_k=5))

    assert "99999, which is outside the vocabulary" in record.untrainable_reason


async def test_an_engine_whose_logprobs_are_of_no_use_says_so_for_its_episodes():
    class Vague(ScriptedEngine):
        features = Features(untrainable="logprobs are not at the sampling temperature")

    record = await play(Tools(), Vague(["a"], tokenizer=TOKENIZER))

    assert record.untrainable_reason == Vague.features.untrainable
    assert record.stop_reason == "final_answer"
