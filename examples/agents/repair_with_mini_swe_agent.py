"""mini-swe-agent repairs published libraries; its commands run in the sandbox.

pip install mini-swe-agent '.[miniswe]'
agentenv eval examples/agents/repair_with_mini_swe_agent.py -m hf:PATH
"""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

import agentenv as ae
from agentenv_envs.mini_swe import RepairAgent, tasks

RULES = (
    "Repair the library in the current directory. Each command starts in it. When you are done, run: "
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
)


class InSandbox(LocalEnvironment):
    """The environment of mini-swe-agent, with commands that run elsewhere."""

    def __init__(self, shell: Callable[[str], str]):
        super().__init__()
        self.shell = shell

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        output = {"output": self.shell(action["command"]), "returncode": 0, "exception_info": ""}
        self._check_finished(output)
        return output


class Repairs(RepairAgent):
    """Repair a mistake in a library with a shell."""

    async def agent(self, url: str, task: Any) -> object:
        loop = asyncio.get_running_loop()

        def shell(command: str) -> str:  # mini-swe-agent runs in a thread
            return asyncio.run_coroutine_threadsafe(self.shell(command), loop).result()

        model = LitellmModel(
            model_name="openai/any", model_kwargs={"api_base": f"{url}/v1", "api_key": "any"}
        )
        texts = {"system_template": RULES, "instance_template": "{{task}}"}
        agent = DefaultAgent(model, InSandbox(shell), **texts, step_limit=20, cost_limit=0)
        return await asyncio.to_thread(agent.run, self.issue)


ae.register("agents/Repairs-v0", Repairs, tasks={"test": partial(tasks, "test")}, sandbox="auto")
