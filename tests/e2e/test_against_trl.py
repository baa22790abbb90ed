"""The same scripted episodes through TRL's own tool loop: equal where TRL is right.

Runs where trl is installed (`pip install trl`), on the CPU, with a stub in the place of the model.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.render import Renderer
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import TOKENIZER, Tools, play

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class More(Tools):
    @tool
    async def later(self, text: str) -> str:
        "Say it back, asynchronously."
        return f"later {text}"

    @tool
    def table(self) -> dict[str, object]:
        "Give a mapping."
        return {"ok": True, "x": None}


@pytest.fixture(scope="module")
def trl():
    module = pytest.importorskip("trl")
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import add_response_schema

    templates = Path(module.__file__).parent / "chat_templates"
    made = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER.backend,
        eos_token="<|im_end|>",
        chat_template=(templates / "qwen3.jinja").read_text(),
    )
    made = add_response_schema(made)
    made.chat_template = (templates / "qwen3_training.jinja").read_text()
    return made


def through_trl(made, prompt: list[int], script: list[str], *, max_completion: int = 10**9):
    from trl.trainer.grpo_trainer import GRPOTrainer

    async def later(text):
        return f"later {text}"

    turns = [made.encode(text + "<|im_end|>", add_special_tokens=False) for text in script]
    rest = iter(turns[1:])

    def generate(prompt_ids, *args, **kwargs):
        ids = list(next(rest))
        return [ids], [[-0.5] * len(ids)]

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainer = SimpleNamespace(
        _sync_tool_dicts=[{"echo": lambda text: text, "table": lambda: {"ok": True, "x": None}}],
        _async_tool_dicts=[{"later": later}],
        async_loop=loop,
        max_tool_calling_iterations=9,
        max_completion_length=max_completion,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**9)),
        _is_vlm=False,
        tools=None,
        environment_factories=None,
        processing_class=made,
        _tokenizer=made,
        chat_template=made.chat_template,
        chat_template_kwargs={},
        _generate_single_turn=generate,
    )
    trainer._get_tool_suffix_ids = GRPOTrainer._get_tool_suffix_ids.__get__(trainer)
    first = turns[0]
    mask, messages, ids, logprobs, *_ = GRPOTrainer._tool_call_loop(
        trainer,
        [[{"role": "user", "content": "go"}]],
        [list(prompt)],
        [list(first)],
        [[made.parse_response(first, prefix=prompt)]],
        [[-0.5] * len(first)],
        None,
        {},
    )
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    return ids[0], [bool(one) for one in mask[0]], logprobs[0], messages[0]


def through_ours(made, script: list[str], **limits):
    renderer = Renderer(TOKENIZER, chat_template=made.chat_template)
    record = asyncio.run(play(More(), script, renderer=renderer, **limits))
    sequence = record.sequences[0]
    prompt = list(sequence.spans[0].token_ids)
    size = len(prompt)
    return record, prompt, sequence.token_ids[size:], sequence.loss_mask[size:], sequence.logprobs[size:]


@pytest.mark.parametrize(
    "script",
    [
        [tool_call("echo", text="hi"), "done"],
        [tool_call("echo", text="a"), tool_call("echo", text="b"), "done"],
        [tool_call("echo", text="a") + "\n" + tool_call("echo", text="b"), "done"],
        ["no call at all"],
    ],
)
def test_sane_episodes_give_the_same_tokens_mask_and_logprobs(trl, script):
    _, prompt, ids, mask, logprobs = through_ours(trl, script)

    theirs = through_trl(trl, prompt, script)

    assert (ids, mask, logprobs) == theirs[:3]


def test_parallel_results_are_reordered_there_and_not_here(trl):
    script = [tool_call("later", text="1") + "\n" + tool_call("echo", text="2"), "done"]
    record, prompt, *_ = through_ours(trl, script)

    *_, messages = through_trl(trl, prompt, script)

    assert [one["content"] for one in messages if one["role"] == "tool"] == ["2", "later 1"]
    assert [one["content"] for one in record.messages if one["role"] == "tool"] == ["later 1", "2"]


def test_an_overlong_result_is_dropped_without_a_word_there_and_trimmed_and_flagged_here(trl):
    script = [tool_call("echo", text="x" * 400), "done"]
    _, prompt, *_ = through_ours(trl, script)
    room = len(prompt) + len(trl.encode(script[0] + "<|im_end|>")) + 300

    record, prompt, *_ = through_ours(trl, script, max_context_tokens=room)
    ids, mask, _, messages = through_trl(trl, prompt, script, max_completion=room - len(prompt))

    assert all(mask)
    assert ids[-1] == trl.eos_token_id
    assert [one["role"] for one in messages] == ["assistant"]
    assert record.turns[0].tool_results[0].trimmed
    assert record.answer == "done"


def test_a_mapping_is_python_there_and_json_here(trl):
    script = [tool_call("table"), "done"]
    record, prompt, *_ = through_ours(trl, script)

    *_, messages = through_trl(trl, prompt, script)

    assert messages[1]["content"] == "{'ok': True, 'x': None}"
    assert json.loads(record.messages[2]["content"]) == {"ok": True, "x": None}
