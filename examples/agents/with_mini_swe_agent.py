"""mini-swe-agent works in a directory with shell commands; `pip install mini-swe-agent`.

agentenv eval examples/agents/with_mini_swe_agent.py -m hf:PATH

Its commands run on this machine as you. Run models that you do not trust on a machine of their own.
"""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

import agentenv as ae

TASKS = [{"name": f"{word}.txt", "word": word} for word in ("apple", "pear", "plum", "quince")]
RULES = "Work in the current directory. When you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class WriteFile(ae.AgentEnv):
    """Write a word into a file."""

    tasks = TASKS

    def agent(self, url: str, task: Any) -> object:
        model = LitellmModel(
            model_name="openai/any", model_kwargs={"api_base": f"{url}/v1", "api_key": "any"}
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=str(self.workspace)),
            system_template=RULES,
            instance_template="{{task}}",
            step_limit=8,
            cost_limit=0,
        )
        return agent.run(f"Write the word {task['word']} into the file {task['name']}.")

    def reward(self, workspace: Path, name: str, word: str) -> float:
        file = workspace / name
        return float(file.is_file() and file.read_text().strip() == word)
