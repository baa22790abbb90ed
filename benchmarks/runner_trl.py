"""Run TRL's synchronous tool loop on the episodes of `runner.py`, with a minimal stand-in for its trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema
from trl.trainer.grpo_trainer import GRPOTrainer

from agentenv.render import Renderer


def tokenizer(renderer: Renderer) -> Any:
    """Return the tokenizer in the form that TRL needs, with the Qwen3 template, which its loop supports."""
    templates = Path(trl.__file__).parent / "chat_templates"
    backend = renderer.tokenizer.backend
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template=(templates / "qwen3.jinja").read_text(),
    )
    made = add_response_schema(made)
    # TRL itself replaces a template that does not preserve prefixes by this one.
    made.chat_template = (templates / "qwen3_training.jinja").read_text()
    return made


def trainer_of(made: Any, generate: Callable[..., Any], **own: Any) -> Any:
    """Return only the trainer attributes that TRL's tool loop reads; `own` has those of the episodes."""
    trainer = SimpleNamespace(
        async_loop=None,
        max_completion_length=10**9,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**9)),
        _is_vlm=False,
        environment_factories=None,
        processing_class=made,
        _tokenizer=made,
        chat_template=made.chat_template,
        chat_template_kwargs={},
        _generate_single_turn=generate,
        **own,
    )
    trainer._get_tool_suffix_ids = GRPOTrainer._get_tool_suffix_ids.__get__(trainer)
    return trainer


def episodes(
    renderer: Renderer, schema: dict[str, Any], text: str, turns: int, count: int
) -> Callable[[], None]:
    """Return a function that plays episodes with TRL's own tool loop, and checks its calls."""
    made = tokenizer(renderer)
    texts = (
        '<tool_call>\n{"name": "look", "arguments": {"page": 1}}\n</tool_call><|im_end|>',
        "That is all.<|im_end|>",
    )
    call, last = (made.encode(one, add_special_tokens=False) for one in texts)
    asked = 0

    def generate(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        ids = call if asked < turns else last
        return [list(ids) for _ in prompt_ids], [[-0.5] * len(ids) for _ in prompt_ids]

    trainer = trainer_of(
        made,
        generate,
        max_tool_calling_iterations=turns,
        tools=[schema],
        _sync_tool_dicts=[{"look": lambda page: text}] * count,
        _async_tool_dicts=[{}] * count,
    )

    def run() -> None:
        nonlocal asked
        asked = 0
        prompts = [[{"role": "user", "content": "Read the pages and answer."}] for _ in range(count)]
        rendered = [
            made.apply_chat_template(
                one, tools=[schema], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for one in prompts
        ]
        answers = [[made.parse_response(call, prefix=rendered[0])] for _ in range(count)]
        done = GRPOTrainer._tool_call_loop(
            trainer,
            prompts,
            rendered,
            [list(call) for _ in range(count)],
            answers,
            [[-0.5] * len(call) for _ in range(count)],
            None,
            {},
        )
        assert done[4] == turns * count, "TRL's loop made other calls"

    return run
