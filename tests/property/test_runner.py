"""Random episodes: whatever model, environment, user and engine do, the invariants hold.

The comments cite the invariants of an episode by these numbers:

I1: Ids, mask, log-probabilities and turn index of a sequence have one length.
I2: The ids and log-probabilities of a turn are those that the engine returned.
I3: A token outside the mask has log-probability 0.
I4: A token under the mask has a finite log-probability, and the mask is true exactly where the policy
     sampled.
I5: Sampled tokens are never changed, also not by a cut.
I6: Every prompt that the engine was asked with is a prefix of the record.
I7: Where the model writes as the template does, the record reads as a full render of its messages.
I8: A prompt and what may be sampled after it fit the context together.
I9: An observation leaves room for an answer, and the record says what the model was shown.
I11: An episode is exactly one of terminated, truncated and failed.
I12: An episode whose last completion was cut at its length is truncated.
I13: A completion that was cut runs no tool.
I14: Every call has one answer, in call order.
I16: A turn's reward stands on the last token that it sampled.
I19: The weights versions of the record are those of its trained spans.
I20: The number of submitted episodes is the sum of the outcomes.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import jinja2.sandbox
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from agentenv.core import ContextTooLong, EngineUnavailable, RunLimits, StopReason, Trajectory
from agentenv.engine import Completion
from agentenv.envs import Env
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions, User, UserTurn

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
STOP = 258
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("f", "g")
]

words = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=12)
calls = st.builds(
    lambda name, word: f"<tool_call>{json.dumps({'name': name, 'arguments': {'w': word}})}</tool_call>",
    st.sampled_from(["f", "g"]),
    words,
)
broken_calls = st.sampled_from(
    [
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name":"f","arguments":{}</tool_call>',
        '<tool_call>{"name":"f"',
        '<tool_call>{"name":"nothing","arguments":{}}</tool_call>',
        "<tool_call></tool_call>",
    ]
)


@dataclass
class Turn:
    """What the model samples in one turn, and what it is answered."""

    ids: tuple[int, ...]
    canonical: bool = False
    fault: str = ""
    sizes: tuple[int, ...] = ()
    reward: float = 0.0
    env: str = "go"
    user: UserTurn | None = None


def canonical_ids(text: str) -> tuple[int, ...]:
    return (*TOKENIZER.encode(text), STOP)


completions = st.one_of(
    st.tuples(st.builds(canonical_ids, words), st.just(True)),
    st.tuples(
        st.builds(lambda many: canonical_ids("".join(many)), st.lists(calls, min_size=1, max_size=3)),
        st.just(True),
    ),
    st.tuples(
        st.builds(
            lambda many: canonical_ids("".join(many)), st.lists(calls | broken_calls, min_size=1, max_size=3)
        ),
        st.just(False),
    ),
    st.tuples(
        st.builds(lambda ids: (*ids, STOP), st.lists(st.integers(0, 255), max_size=30)), st.just(False)
    ),
    st.tuples(st.builds(tuple, st.lists(st.integers(0, 264), min_size=1, max_size=30)), st.just(False)),
)
faults = st.sampled_from(
    [""] * 12 + ["abort", "length", "short", "nan", "raise", "too_long", "empty", "other"]
)
users = st.builds(
    UserTurn,
    text=st.none() | st.integers(0, 200).map(lambda size: "u" * size),
    done=st.sampled_from([False, False, True]),
    reward=st.sampled_from([0.0, 0.5]),
    turn_rewards=st.sampled_from([{}, {0: 0.25}]),
)
turns = st.builds(
    lambda completion, **rest: Turn(completion[0], completion[1], **rest),
    completions,
    fault=faults,
    sizes=st.tuples(*[st.integers(0, 300)] * 3),
    reward=st.sampled_from([0.0, 1.0, -0.5]),
    env=st.sampled_from(["go"] * 14 + ["terminate", "truncate", "done", "raise"]),
    user=users,
)
limits = st.builds(
    lambda **given: given,
    max_turns=st.integers(1, 6) | st.none(),
    max_tool_calls=st.none() | st.integers(0, 5),
    max_tool_calls_per_turn=st.none() | st.integers(1, 3),
    max_parse_errors=st.none() | st.integers(0, 3),
    max_user_turns=st.integers(0, 3) | st.none(),
    max_context_tokens=st.none() | st.integers(350, 900) | st.integers(230, 500) | st.integers(1, 300),
    max_tokens_per_turn=st.none() | st.just(150) | st.integers(1, 150),
    max_total_tokens=st.none() | st.integers(200, 600) | st.integers(1, 300),
    max_tool_output_tokens=st.integers(1, 200) | st.none(),
    min_answer_tokens=st.integers(1, 30),
)


@dataclass
class Stage:
    """One random episode, and what was seen of it from outside."""

    script: list[Turn]
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    given: list[Completion] = field(default_factory=list)
    ran: list[list[str]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    runner: Runner | None = None
    turn: int = -1

    def now(self) -> Turn:
        return self.script[min(self.turn, len(self.script) - 1)]

    def check(self) -> None:
        """I1 to I4 hold after every event, in the middle of the episode."""
        for episode in self.runner.watchdog.episodes:
            for sequence in episode._conversation.sequences:
                check_aligned(sequence)


class Engine:
    name, weights_version, max_context_tokens = "random", 5, None

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def generate(self, prompt_ids, sampling, *, stop_token_ids, session_id=None, deadline_s=None):
        stage = self.stage
        stage.check()
        stage.turn += 1
        turn = stage.now()
        stage.prompts.append(list(prompt_ids))
        stage.asked.append(sampling.max_tokens)
        ids = turn.ids[: sampling.max_tokens]
        reason = "length" if turn.fault == "length" or len(ids) < len(turn.ids) else "stop"
        logprobs = tuple(-0.01 * (1 + place % 7) for place in range(len(ids)))
        if turn.fault == "raise":
            raise EngineUnavailable("down")
        if turn.fault == "too_long":
            raise ContextTooLong("too long")
        if turn.fault == "abort":
            return Completion(ids, logprobs, "abort")
        if turn.fault == "empty":
            return Completion((), (), "stop")
        if turn.fault == "short":
            logprobs = logprobs[1:]
        if turn.fault == "nan":
            logprobs = (float("nan"), *logprobs[1:])
        ranges = ((5, 0, len(ids)),) if len(ids) < 4 else ((5, 0, 2), (6, 2, len(ids)))
        given = Completion(ids, logprobs, reason, ranges, sampled_by_policy=turn.fault != "other")
        stage.given.append(given)
        return given

    async def release(self, session_id):
        self.stage.closed.append("session")

    async def close(self):
        pass


class World(Env):
    def __init__(self, stage: Stage, *, ends_on_text: bool) -> None:
        self.stage = stage
        self.ends_on_text = ends_on_text
        self.done = False

    @property
    def tool_schemas(self):
        return TOOLS

    async def reset(self, *, seed=None, options=None):
        return "start", {}

    async def step(self, action):
        stage = self.stage
        stage.check()
        turn = stage.now()
        made = action.get("tool_calls", [])
        stage.ran.append([call["id"] for call in made])
        if turn.env == "raise":
            raise RuntimeError("broken world")
        self.done = turn.env == "done"
        said = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": "r" * size,
            }
            for call, size in zip(made, turn.sizes, strict=False)
        ]
        if not made and not self.ends_on_text:
            said.append({"role": "user", "content": "o" * turn.sizes[0]})
        return said, turn.reward, turn.env == "terminate", turn.env == "truncate", {}

    async def is_done(self):
        return self.done

    async def finish(self, stop_reason):
        self.stage.finished.append(stop_reason)
        return 0.75

    async def close(self):
        self.stage.closed.append("env")


class Person(User):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def respond(self, messages):
        self.stage.check()
        return self.stage.now().user

    async def close(self):
        self.stage.closed.append("user")


def check_aligned(sequence) -> None:
    ids, mask, logprobs, index = (
        sequence.token_ids,
        sequence.loss_mask,
        sequence.logprobs,
        sequence.turn_index,
    )
    assert len(ids) == len(mask) == len(logprobs) == len(index) == len(sequence)  # I1
    place = 0
    for span in sequence.spans:
        for offset in range(len(span)):
            trained = mask[place + offset]
            assert trained == (span.source == "model")
            assert trained or logprobs[place + offset] == 0.0  # I3
            assert not trained or -100 < logprobs[place + offset] <= 0.001  # I4
        place += len(span)


def check_tokens(stage: Stage, record: Trajectory) -> None:
    (sequence,) = record.sequences
    ids, mask, logprobs = sequence.token_ids, sequence.loss_mask, sequence.logprobs
    check_aligned(sequence)
    assert sum(mask) == sum(
        turn.num_tokens for turn, one in zip(record.turns, stage.given, strict=False) if one.sampled_by_policy
    )
    for turn, prompt, sampled in zip(record.turns, stage.prompts, stage.given, strict=False):
        assert ids[: turn.start] == prompt  # I6
        assert ids[turn.start : turn.end] == list(sampled.token_ids)  # I2, I5
        if sampled.sampled_by_policy:
            assert tuple(logprobs[turn.start : turn.end]) == sampled.logprobs  # I2
            assert all(mask[turn.start : turn.end])
            assert sequence.turn_index[turn.end - 1] == turn.index  # I16
    for prompt in stage.prompts:
        assert ids[: len(prompt)] == prompt  # I6
    if record.error is None and record.stop_reason is not StopReason.CONTEXT_LENGTH and record.turns:
        assert len(ids) == record.turns[-1].end, "an episode ends on the last token of a completion"


def check_budget(stage: Stage, record: Trajectory, bounds: dict) -> None:
    context = bounds["max_context_tokens"]
    for prompt, asked in zip(stage.prompts, stage.asked, strict=True):
        assert asked >= 1
        assert context is None or len(prompt) + asked <= context  # I8
        assert bounds["max_tokens_per_turn"] is None or asked <= bounds["max_tokens_per_turn"]
    if context is not None and stage.prompts:
        assert len(record.sequences[0]) <= context
    total = bounds["max_total_tokens"]
    assert total is None or record.num_sampled_tokens <= total
    assert bounds["max_turns"] is None or len(record.turns) <= bounds["max_turns"]
    assert bounds["max_tool_calls"] is None or sum(map(len, stage.ran)) <= bounds["max_tool_calls"]
    assert max(map(len, stage.ran), default=0) <= (bounds["max_tool_calls_per_turn"] or 1_000)
    for later in stage.prompts[1:]:
        assert context is None or context - len(later) >= bounds["min_answer_tokens"]  # I9
        assert RENDERER.decode(later[-30:]).endswith(
            "<|im_end|>\n<|im_start|>assistant\n"
        )  # framing is whole
    limit = bounds["max_tool_output_tokens"]
    for result in (result for turn in record.turns for result in turn.tool_results):
        if limit is not None and result.text.startswith("r"):
            assert result.trimmed == (result.full_chars is not None)
    for request, turn in zip(stage.prompts[1:], record.turns, strict=False):
        shown = RENDERER.decode(request[turn.end :])
        for result in turn.tool_results:
            assert result.text in shown  # I9: the text is what the tokens say


def check_answers(stage: Stage, record: Trajectory) -> None:
    messages = list(record.messages)
    for turn in record.turns:
        wanted = [call.id for call in turn.tool_calls if call.status != "in_thinking"]
        if record.error is not None and turn is record.turns[-1] and not turn.tool_results:
            continue
        assert [result.tool_call_id for result in turn.tool_results] == wanted  # I14
        if turn.finish_reason == "length":
            assert all(result.error_kind == "not_run" for result in turn.tool_results)  # I13
    told = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert told == [result.tool_call_id for turn in record.turns for result in turn.tool_results]
    ran = [one for step in stage.ran for one in step]
    answered = [
        result.tool_call_id for turn in record.turns for result in turn.tool_results if not result.is_error
    ]
    assert set(answered) <= set(ran)


def check_end(stage: Stage, record: Trajectory, *, with_user: bool) -> None:
    reason = record.stop_reason
    assert record.terminated + record.truncated + reason.failed == 1  # I11
    assert reason.failed == (record.error is not None) == (not record.trainable and record.error is not None)
    assert stage.finished == ([] if reason.failed else [reason.value])
    assert sorted(stage.closed) == sorted(["env", "session", *(["user"] if with_user else [])])
    if reason.failed:
        assert record.reward is None
    else:
        assert record.reward == (sum(record.turn_rewards) if record.turns else 0.75)
    if record.turns and record.turns[-1].finish_reason == "length":
        assert record.truncated or record.error is not None or reason is StopReason.ENV_DONE  # I12
    for turn in record.turns[:-1]:
        assert turn.finish_reason == "stop"
    spanned = {span.weights_version for span in record.sequences[0].spans if span.trained}
    assert set(record.weights_versions) == spanned <= {5, 6}  # I19


def check_template(stage: Stage, record: Trajectory) -> None:
    """I7: where the model writes as the template does, tokens read as a full render of the messages."""
    played = [stage.script[min(place, len(stage.script) - 1)] for place in range(len(record.turns))]
    if (
        not all(turn.canonical and turn.fault in {"", "other"} for turn in played)
        or record.error
        or not played
    ):
        return
    if any(turn.finish_reason == "length" for turn in record.turns):
        return
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    messages = json.loads(json.dumps(record.messages))
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    # A prompt that the engine refused ends on the opening of a turn that was never sampled.
    refused = record.stop_reason is StopReason.CONTEXT_LENGTH
    template = environment.from_string(TOKENIZER.chat_template)
    rendered = template.render(messages=messages, tools=TOOLS, add_generation_prompt=refused)
    assert rendered.startswith(RENDERER.decode(record.sequences[0].token_ids))


@settings(max_examples=2 * settings.default.max_examples)
@given(
    script=st.lists(turns, min_size=1, max_size=6),
    bounds=limits,
    ends_on_text=st.booleans(),
    with_user=st.booleans(),
    explain=st.booleans(),
)
def test_every_random_episode_keeps_the_invariants(script, bounds, ends_on_text, with_user, explain):
    if bounds["max_turns"] is None:
        bounds["max_turns"] = 12  # a script repeats its last turn for ever
    stage = Stage(script)
    stage.runner = Runner(Engine(stage), RENDERER, RunLimits(**bounds), options=RunnerOptions(retries=0))
    world = World(stage, ends_on_text=ends_on_text and not with_user)

    record = asyncio.run(
        stage.runner.run_episode(
            world,
            {"n": 1},
            user=Person(stage) if with_user else None,
            done_policy="explain" if explain else "stop",
        )
    )

    note(f"{record.stop_reason} {record.error}")
    event(record.stop_reason.value)
    check_tokens(stage, record)
    check_budget(stage, record, bounds)
    check_answers(stage, record)
    check_end(stage, record, with_user=with_user)
    check_template(stage, record)
    assert stage.runner.ledger.balanced  # I20
    assert stage.runner.ledger.outcomes == {record.stop_reason: 1}
