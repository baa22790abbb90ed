"""Environments whose agents hand over, ask a sub-agent, or replace their history by a summary."""

import openai

import agentenv as ae

TASKS = [{"number": number} for number in range(4)]


@ae.tool
def route(to: str) -> str:
    """Hand the conversation to somebody else."""
    return to


@ae.tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Team(ae.AgentEnv):
    """Ask the model, and return the conversation with its reply and the results of its calls."""

    tasks = TASKS

    async def ask(self, system, messages, *tools):
        said = await self.sdk.chat.completions.create(
            model="any",
            messages=[{"role": "system", "content": system}, *messages],
            tools=[one.schema() for one in tools] or openai.omit,
        )
        message = said.choices[0].message
        calls = message.tool_calls or ()
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        return [*messages, message.model_dump(exclude_none=True), *results]

    async def agent(self, url, task):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as self.sdk:
            await self.work([{"role": "user", "content": f"What is {task['number']} * 3?"}])
        return "6"

    def reward(self, answer, number):
        return 1.0


class Handoff(Team):
    """Hand the conversation to an agent with another system prompt and other tools."""

    async def work(self, asked):
        history = await self.ask("You triage.", asked, route)
        await self.ask("You are an expert.", history, multiply)


class SubAgent(Team):
    """Ask another agent in a conversation of its own."""

    async def work(self, asked):
        history = await self.ask("You lead.", asked, route)
        found = await self.ask("You search.", [{"role": "user", "content": "Find it."}], multiply)
        told = {"role": "user", "content": f"Somebody says: {found[-1]['content']}"}
        await self.ask("You lead.", [*history, told], route)


class Compaction(Team):
    """Go on from a summary instead of the history."""

    async def work(self, asked):
        history = await self.ask("You work.", asked, multiply)
        summary = await self.ask("You work.", [*history, {"role": "user", "content": "Summarise."}])
        short = {"role": "user", "content": f"So far: {summary[-1].get('content')}. Go on."}
        await self.ask("You work.", [short], multiply)


for env in (Handoff, SubAgent, Compaction):
    ae.register(f"team/{env.__name__}-v0", env)
