"""Customer service in tau2's domains: `tau2:retail`, `airline`, `telecom` and `banking_knowledge`.

1. The agent's tools, the policy that is its system prompt, the tasks and the scorers are those of the package
   inspect-evals, and run unchanged.
2. The user is a part of the environment: `env.user` names the model that plays it, with tau2's guidelines and
   the task's scenario. Its default, `script`, needs no model; see `agentenv_worlds.tau2.user`.
3. The episode ends when the user ends the conversation, or after 100 exchanges.
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

from agentenv.core import (
    JsonValue,
    Message,
    StopReason,
    ToolError,
    UsageError,
    text_of,
)
from agentenv.engine import TextModel
from agentenv.envs import ToolEnv
from agentenv.tools import Tool, Toolbox
from agentenv_worlds.calls import message_with_calls, read_arguments
from agentenv_worlds.names import check_known
from agentenv_worlds.tau2.package import DOMAINS, Store, check_installed, data_folder, module, using
from agentenv_worlds.tau2.user import CLOSING, Tau2User, is_last, user_of
from agentenv_worlds.turns import turn_of

__all__ = ["MAX_TURNS", "Tau2", "check_domain", "rows", "splits"]

MAX_TURNS = 200
"""Turns of the agent in one episode, as many as tau2 allows steps."""

MAX_EXCHANGES = 100
"""Messages of the agent to the user in one episode; inspect-evals has the same limit."""

LONGEST = 20_000
"""Characters of one text argument; some tools repeat it in their answer, or compute long on it."""

RETRIEVALS = ("grep", "full_kb", "no_knowledge")
"""Ways in which the agent of banking_knowledge reads the knowledge base; the first is the usual one."""

_INSTRUCTIONS = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
</instructions>
{policy}"""
"""The system prompt of tau2; the policy comes with its tags."""


class Tau2(ToolEnv):
    """One conversation with a customer.

    Args:
        domain: `retail`, `airline`, `telecom` or `banking_knowledge`.
        user: who plays the user: `script`, a model string such as `openai:gpt-4.1`, or a `TextModel`.
        retrieval: in `banking_knowledge`, how the agent reads the knowledge base: `grep`, `full_kb` or
            `no_knowledge`.

    Raises:
        UsageError: There is no such way to read the knowledge base.
    """

    ends_on_text = False
    explanation: str
    """Why tau2's scorer gave the reward of the last episode."""

    def __init__(self, domain: str, user: str | TextModel = "script", retrieval: str = "grep") -> None:
        if retrieval not in RETRIEVALS:
            raise UsageError(f"retrieval must be one of {', '.join(RETRIEVALS)}, not {retrieval!r}")
        self._domain = domain.removesuffix("_knowledge")
        if domain == "airline":
            self.trivial_limit = 0.5  # in 20 of the 50 tasks the right thing is to change nothing
        self._user_model = user
        self._retrieval = retrieval
        self._store = Store()
        self.explanation = ""
        self.tools = [_raw_tool(make) for make in self._agent_tools()]

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the agent's tools, with types; the tools themselves take what they are given."""
        return [_tool(make).schema() for make in self._agent_tools()]

    async def start(self, id: str, domain: str, number: int, seed: int) -> list[Message]:
        """Set up the domain as the task has it, and let the user speak first."""
        task = _task(domain, id)
        self._store = Store(rng=random.Random(seed))
        self._agent_calls: list[SimpleNamespace] = []
        self._exchanges = 0
        with using(self._store):
            self._set_up(task)
        user_tools = _RawToolbox(self._user_tools())
        scenario = module("data_model.tasks").Task.model_validate(task).user_scenario
        told = f"{self._guidelines}\n<scenario>\n{scenario}\n</scenario>\n"
        self._user: Tau2User = user_of(self._user_model, task, told, user_tools, seed)
        with using(self._store):
            opening = await self._user.speak(None)
        return [
            {"role": "system", "content": _INSTRUCTIONS.format(policy=self._policy)},
            {"role": "user", "content": opening},
        ]

    async def step(self, action: Message) -> Any:
        """Run the agent's calls, or let the user answer its message."""
        calls = action.get("tool_calls") or ()
        with using(self._store):
            if calls:
                self._agent_calls.extend(filter(None, map(_recorded, calls)))
                return await super().step(action)
            answer = await self._user.speak(text_of(action))
        self._exchanges += 1
        if is_last(answer):
            return [], 0.0, True, False, {}
        return answer, 0.0, False, self._exchanges >= MAX_EXCHANGES, {}

    async def reward(self, stop_reason: str) -> float:
        """Return 1 if the user ended the conversation and tau2's scorer accepts it, else 0."""
        if stop_reason != StopReason.ENV_TERMINATED:
            self.explanation = f"The conversation did not end by itself: {stop_reason}."
            return 0.0
        state = SimpleNamespace(
            messages=list(map(_message, self._user.messages)),
            metadata={"instance": "Agent", "task": _task(str(self.task["domain"]), str(self.task["id"]))},
        )
        stored = module("common.agents").StoredAgentState
        said = [_message({"role": "assistant", "content": ""}, [call]) for call in self._agent_calls]
        scorer = getattr(module(f"{self._domain}.scorer"), f"{self._domain}_scorer")
        with using(self._store):
            self._store.objects[stored, "Agent"] = SimpleNamespace(messages=said)
            score = await scorer()(state, None)
        self.explanation = score.explanation or ""
        return float(score.value == "C")

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Perform the agent's part of the ground truth, and let the scripted user perform its own."""
        script = _gold_messages(str(task["domain"]), str(task["id"]))
        return script[min(turn_of(messages), len(script) - 1)]

    # What the domains have each in its own way ---------------------------------------------

    def _agent_tools(self) -> list[Callable[[], Any]]:
        tools = module(f"{self._domain}.tools")
        if self._domain != "banking":
            name = "all_retail_tools" if self._domain == "retail" else f"all_{self._domain}_agent_tools"
            return getattr(tools, name, None) or getattr(tools, f"all_{self._domain}_tools")
        search = [tools.banking_grep] if self._retrieval == "grep" else []
        return [*tools.all_banking_agent_tools, *search]

    def _user_tools(self) -> list[Callable[[], Any]]:
        if self._domain in {"retail", "airline"}:
            return []
        return getattr(module(f"{self._domain}.user_tools"), f"all_{self._domain}_user_tools")

    def _set_up(self, task: Mapping[str, Any]) -> None:
        """Load the databases, and bring them into the task's first state."""
        if self._domain == "telecom":
            environment = module("telecom.environment").get_environment()
            actions = (task.get("initial_state") or {}).get("initialization_actions") or ()
            call = module("data_model.tasks").EnvFunctionCall
            for action in actions:
                module("telecom.solver").perform_action(environment, call.model_validate(action))
        elif self._domain == "banking":
            environment = module("banking.environment")
            environment.initialize_environment()
            first = module("data_model.tasks").Task.model_validate(task).initial_state
            environment.apply_initial_state(
                environment.get_agent_tools(), environment.get_user_tools(), first
            )

    @property
    def _guidelines(self) -> str:
        utils = module("utils")
        return str(
            utils.USER_SIMULATOR_GUIDELINES_WITH_TOOLS
            if self._user_tools()
            else utils.USER_SIMULATOR_GUIDELINES
        )

    @property
    def _policy(self) -> str:
        agents = module(f"{self._domain}.agents")
        if self._domain == "telecom":
            return str(agents.get_domain_policy(workflow=False))
        if self._domain == "banking":
            return str(agents._get_domain_policy(self._retrieval))  # noqa: SLF001 - it has no public name
        return str(agents.get_domain_policy())


@functools.lru_cache(maxsize=256)
def _tool(make: Callable[[], Any]) -> Tool[..., Any]:
    """Return one of tau2's tools, which works on the objects of the store that is in use."""
    execute = make()

    @functools.wraps(execute)
    async def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if max((len(value) for value in given if isinstance(value, str)), default=0) > LONGEST:
            raise ToolError(f"an argument is longer than {LONGEST} characters")
        try:
            return await execute(*args, **kwargs)
        except Exception as error:  # as in tau2, whatever a tool raises is its answer
            raise ToolError(f"Error: {error}") from error

    # Calls of one turn run in order, because they change the same database.
    return Tool.from_function(call, name=cast("Any", make).__name__, parallel=False)


@functools.lru_cache(maxsize=256)
def _raw_tool(make: Callable[[], Any]) -> Tool[..., Any]:
    """Return a tool that takes arguments of any type, as tau2 passes them on: "5" is not made into 5."""
    typed = _tool(make)
    names: Mapping[str, Any] = typed.parameters
    parameters = {
        "type": "object",
        "properties": {name: {} for name in names.get("properties", {})},
        "required": names.get("required", []),
        "additionalProperties": False,
    }
    return Tool.from_schema(typed.name, typed.description, parameters, typed.function, parallel=False)


class _RawToolbox(Toolbox):
    """Tools that take arguments of any type, and are shown with their types."""

    def __init__(self, makes: Sequence[Callable[[], Any]]) -> None:
        super().__init__([_raw_tool(make) for make in makes])
        self._makes = makes

    def schemas(self, dialect: Literal["openai", "strict", "inline"] = "openai") -> list[dict[str, Any]]:
        """Return the schemas with types."""
        return [_tool(make).schema(dialect) for make in self._makes]


def check_domain(name: str) -> None:
    """Check that a domain exists and that its package is installed.

    Raises:
        UnknownEnvironment: There is no such domain.
        DependencyMissing: inspect-evals is not installed.
    """
    check_known("tau2 has no domain", name, DOMAINS)
    check_installed(name)


def splits(domain: str) -> tuple[str, ...]:
    """Return the names of a domain's splits."""
    return tuple(_splits(domain))


def rows(domain: str, split: str) -> list[dict[str, object]]:
    """Return the tasks of a split."""
    numbers = {id: number for number, id in enumerate(_tasks(domain))}
    return [{"id": id, "domain": domain, "number": numbers[id]} for id in _splits(domain)[split]]


@functools.lru_cache(maxsize=len(DOMAINS))
def _splits(domain: str) -> Mapping[str, Sequence[str]]:
    file = data_folder() / "domains" / domain / "split_tasks.json"
    if not file.exists():
        return {"test": list(_tasks(domain))}
    named: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    # Together these are the split `base`, with which results are reported; other splits overlap with them.
    return {name: named[name] for name in ("train", "test")}


def _task(domain: str, id: str) -> Mapping[str, Any]:
    """Return a new copy of a task: tau2 puts parts of it into its database, where they are changed."""
    return copy.deepcopy(_tasks(domain)[id])


@functools.lru_cache(maxsize=len(DOMAINS))
def _tasks(domain: str) -> Mapping[str, Mapping[str, Any]]:
    folder = data_folder() / "domains" / domain
    packed = folder / "tasks.json.gz"
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / "tasks.json").read_bytes()
    return {task["id"]: task for task in json.loads(raw)}


@functools.lru_cache(maxsize=512)
def _gold_messages(domain: str, id: str) -> Sequence[Message]:
    """Return the agent's messages of the ground truth; each action of the user is asked for by its name."""
    criteria = _task(domain, id)["evaluation_criteria"]
    prefix = "banking_" if domain == "banking_knowledge" else ""
    said: list[Message] = []
    for action in criteria.get("actions") or ():
        if action.get("requestor") == "user":
            said.append({"role": "assistant", "content": f"Please use {action['name']} now."})
            continue
        name = action["name"] if action["name"].startswith(prefix) else prefix + action["name"]
        said.append(message_with_calls([(name, action["arguments"])]))
    told = " ".join(criteria.get("communicate_info") or ())
    last = f"{told} Is there {CLOSING} I can do for you?".lstrip()
    return [*said, {"role": "assistant", "content": last}]


def _recorded(call: Any) -> SimpleNamespace | None:
    """Return a call for tau2's scorer; None for one that cannot be read, which tau2 never sees."""
    try:
        arguments = read_arguments(call["function"]["arguments"])
    except ValueError:
        return None
    return (
        SimpleNamespace(function=call["function"]["name"], arguments=arguments)
        if isinstance(arguments, dict)
        else None
    )


def _message(message: Message, calls: Sequence[SimpleNamespace] | None = None) -> Any:
    """Return a message as an object of the class for which tau2's scorers look."""
    names = module("common.scorer")
    if message["role"] == "assistant":
        calls = calls or list(filter(None, map(_recorded, message.get("tool_calls") or ())))
        return names.ChatMessageAssistant(text_of(message), list(calls))
    if message["role"] == "user":
        return names.ChatMessageUser(text_of(message))
    return SimpleNamespace(content=text_of(message), tool_calls=None)
