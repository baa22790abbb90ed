r"""Evaluate a model on the worlds that are installed: mean reward, its interval, and the number of episodes.

    python benchmarks/scores.py                                    # the mock, 20 tasks of each world
    python benchmarks/scores.py -m smollm2 -n 5 --max-turns 6 --max-tokens 32 --max-context 4096 \
        -o dtype=bfloat16 --only textworld:simple scienceworld:find-animal --json scores.json

`oracle` is a model, too: it plays the ground truth of the worlds that have one. So is `cheats`: code that
cheats in the place of the oracle's, as in `agentenv check`; what each cheat got of the full marks is kept. A
world whose package is not installed, or that has no oracle where one is asked for, is named with the reason.
Each world is written to the file when it is finished, and `--json` of an older run is continued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import agentenv as ae
from agentenv.core import AgentEnvError
from agentenv.testing import check_env

WORLDS = (
    "bfcl:multi_turn_base",
    "bfcl:parallel",
    "bfcl:simple_python",
    "tau2:retail",
    "tau2:airline",
    "tau2:telecom",
    "tau2:banking_knowledge",
    "agentdojo:workspace",
    "agentdojo:travel",
    "agentdojo:banking",
    "agentdojo:slack",
    "miniwob:click-test-2",
    "miniwob:enter-text",
    "miniwob:click-checkboxes",
    "textworld:simple",
    "textworld:coin_collector",
    "textworld:treasure_hunter",
    "textworld:cooking",
    "scienceworld:boil",
    "scienceworld:find-animal",
    "textworld_express:coin",
    "minigrid:BabyAI-GoToLocal-v0",
    "nethack:NetHackScore-v0",
    "crafter:CrafterReward-v1",
    "arc:arcagi",
    "textarena:TicTacToe-v0",
    "pettingzoo:tictactoe_v3",
    "reasoning_gym:gsm_symbolic",
    "agentenv/KuhnPoker-v0",
    "agentenv/Search-v0",
    "agentenv/MiniSWE-v0",
    "agentenv/FileEdit-v0",
    "agentenv/PythonMath-v0",
    "agentenv/HumanEval-v0",
)

PATIENCE_S = 900.0
"""Seconds that a reset may take: games of TextWorld are made one at a time, and the machine may be busy."""


def score(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one world.

    Raises:
        AgentEnvError: The world is not installed, or the model cannot play it.
    """
    if options.model == "cheats":
        (finding,) = asyncio.run(check_env(name, only=("cheats",))).findings
        return {"cheats": f"{finding.status}: {finding.text}"}
    given = {
        "max_turns": options.max_turns,
        "max_tokens_per_turn": options.max_tokens,
        "max_context_tokens": options.max_context,
    }
    limits = {limit: value for limit, value in given.items() if value is not None}
    limits["env_timeout_s"] = PATIENCE_S
    began, cpu_began = time.perf_counter(), time.process_time()
    report = ae.evaluate(
        name,
        options.model,
        num_tasks=options.tasks,
        limits=limits,
        engine=dict(option.split("=", 1) for option in options.option),
        stop_after_failures=1,
    ).report
    return {
        "reward": None if report.reward is None else asdict(report.reward),
        "success": None if report.success is None else report.success.mean,
        "episodes": report.num_scored,
        "rewards": dict(report.rewards),
        "stop_reasons": dict(report.stop_reasons),
        "prompt_tokens": report.prompt_tokens,
        "sampled_tokens": report.sampled_tokens,
        "errors": [error.error for error in report.errors],
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - cpu_began, 1),
    }


def line(name: str, figures: dict[str, Any]) -> str:
    """Return the line that is printed for a world."""
    if "not_played" in figures or "cheats" in figures:
        return f"{name:<28} {figures.get('not_played') or figures['cheats']}"
    reward = figures["reward"]
    if reward is None:
        return f"{name:<28} no episode has a score: {'; '.join(figures['errors'])[:200]}"
    shown = f"{reward['mean']:>6.2f} [{reward['low']:>5.2f}, {reward['high']:>5.2f}]"
    stops = ", ".join(f"{reason} {count}" for reason, count in figures["stop_reasons"].items())
    return f"{name:<28} {shown} {figures['episodes']:>4} {figures['wall_s']:>7.1f} s   {stops}"


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="mock", help="engine string, `mock`, `oracle` or `cheats`")
    parser.add_argument("-n", "--tasks", type=int, help="tasks of each world (20; 2 with --quick)")
    parser.add_argument("--only", nargs="*", metavar="WORLD", default=list(WORLDS), help="any environments")
    parser.add_argument("--max-turns", type=int, help="turns of an episode")
    parser.add_argument("--max-tokens", type=int, help="tokens of a turn")
    parser.add_argument("--max-context", type=int, help="tokens of a conversation")
    parser.add_argument("-o", "--option", nargs="*", default=[], metavar="NAME=VALUE", help="of the engine")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.tasks = options.tasks or (2 if options.quick else 20)
    return options


def main() -> int:
    """Play the worlds one after another and return the exit code."""
    options = arguments()
    old = options.json is not None and options.json.exists()
    figures: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if old else {}
    played = figures.setdefault(options.model, {})
    print(f"{'world':<28} {'reward':>6} {'95 %':^14} {'n':>4} {'wall':>9}   {options.model}")
    for name in options.only:
        try:
            played[name] = score(name, options)
        except AgentEnvError as error:
            played[name] = {"not_played": " ".join(str(error).split())}
        print(line(name, played[name]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return int(all("not_played" in world for world in played.values()))


if __name__ == "__main__":
    sys.exit(main())
