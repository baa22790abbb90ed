"""Replay tau2's ground truth in the harness that tau2 ships with: tasks of Inspect, with scripted models.

`worlds.py --inspect PYTHON` runs this in an interpreter that has `inspect_ai` and `inspect_evals`, and sends
it the tasks: for each its id and the messages of the agent. The user says the id of its task and, to the
agent's first message, goodbye. It prints the CPU milliseconds of an episode and the number of right ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import tiktoken
from inspect_ai import eval as evaluate
from inspect_ai.model import ChatMessageAssistant, ModelOutput, get_model
from inspect_ai.tool import ToolCall
from inspect_evals.tau2 import tau2

# Inspect estimates the tokens of each tool's answer with an encoding that it would fetch from the network.
tiktoken.get_encoding = lambda name: SimpleNamespace(encode=lambda text, **_: text.split())


def run(domain: str, steps: dict[str, list[dict[str, Any]]]) -> tuple[float, int]:
    """Return the CPU milliseconds of an episode, and how many episodes the scorer accepts."""
    task = getattr(tau2, f"tau2_{domain}")(shuffle=False)
    ids = {str(sample.input[0].content): str(sample.id) for sample in task.dataset}
    task.dataset = task.dataset.filter(lambda sample: str(sample.id) in steps)

    def user(messages: list[Any], *_: Any) -> ModelOutput:
        opening = len(messages) == 2
        text = f"TASK {ids[str(messages[0].content)]}" if opening else "Thank you. ###STOP###"
        return ModelOutput.from_content("mockllm/model", text)

    def agent(messages: list[Any], *_: Any) -> ModelOutput:
        id = next(message.text for message in messages if message.role == "user").removeprefix("TASK ")
        done = sum(message.role == "assistant" for message in messages)
        said = steps[id][min(done, len(steps[id]) - 1)]
        calls = [
            ToolCall(f"call_{done}", call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in said.get("tool_calls") or ()
        ]
        message = ChatMessageAssistant(content=said["content"] or "", tool_calls=calls or None)
        return ModelOutput.from_message(message)

    models = [get_model("mockllm/model", custom_outputs=outputs, memoize=False) for outputs in (agent, user)]
    with tempfile.TemporaryDirectory() as logs:
        began = time.process_time()
        (log,) = evaluate(
            task, model=models[0], model_roles={"user": models[1]}, display="none", log_dir=logs
        )
        spent = time.process_time() - began
        verdicts = [[score.value for score in sample.scores.values()] for sample in log.samples]
    right = sum(all(value in {"C", 1} for value in values) for values in verdicts)
    return 1e3 * spent / len(steps), right


def main() -> None:
    """Read the tasks, play them twice, and print the second time's figures."""
    asked = json.load(sys.stdin)
    run(asked["domain"], asked["steps"])  # loads the data once
    milliseconds, right = run(asked["domain"], asked["steps"])
    print(json.dumps({"milliseconds": milliseconds, "right": right}))


if __name__ == "__main__":
    main()
