"""Environments of other libraries by name, for example `gymnasium:FrozenLake-v1`, `reasoning_gym:countdown`.

This module turns each name into a specification. The adapters, which play such an environment, know
nothing of specifications. Each is imported when the first name with its prefix is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from agentenv.core.by_name import did_you_mean
from agentenv.core.errors import DependencyMissing, UnknownEnvironment, UsageError
from agentenv.envs.spec import EnvSpec

__all__ = ["PEERS", "Peer", "held_out_seats", "held_out_seeds", "train_seats", "train_seeds"]


def train_seeds(seed: int) -> dict[str, object]:
    """Return the training task of a seed; training tasks use even seeds."""
    return {"seed": 2 * seed}


def held_out_seeds(seed: int) -> dict[str, object]:
    """Return the held-out task of a seed; held-out tasks use odd seeds."""
    return {"seed": 2 * seed + 1}


def train_seats(players: int, seed: int) -> dict[str, object]:
    """Return the training task of a seed in a game for several players, each game once for each seat."""
    return {**train_seeds(seed // players), "seat": f"player-{seed % players}"}


def held_out_seats(players: int, seed: int) -> dict[str, object]:
    """Return the held-out task of a seed in a game for several players."""
    return {**held_out_seeds(seed // players), "seat": f"player-{seed % players}"}


def train_agents(agents: tuple[str, ...], seed: int) -> dict[str, object]:
    """Return the training task of a seed in a game for named agents, each game once for each of them."""
    return {**train_seeds(seed // len(agents)), "seat": agents[seed % len(agents)]}


def held_out_agents(agents: tuple[str, ...], seed: int) -> dict[str, object]:
    """Return the held-out task of a seed in a game for named agents."""
    return {**held_out_seeds(seed // len(agents)), "seat": agents[seed % len(agents)]}


def _gymnasium(id: str) -> EnvSpec:
    from agentenv.envs.adapters.gym import GymnasiumText, known

    known(id)
    return EnvSpec.of(
        f"gymnasium/{id.replace('/', '.')}",
        GymnasiumText,
        kwargs={"env": id},
        tasks={"train": train_seeds, "test": held_out_seeds},
        description=f"{id} of Gymnasium, played in text",
    )


def _reasoning_gym(name: str) -> EnvSpec:
    from agentenv.envs.adapters.reasoning import ReasoningGym, datasets, rows

    known = datasets()
    if name not in known:
        raise UnknownEnvironment(f"reasoning-gym has no data set {name!r}", remedy=did_you_mean(name, known))
    return EnvSpec.of(
        f"reasoning_gym/{name}-v0",
        ReasoningGym,
        tasks={"train": partial(rows, name, "train"), "test": partial(rows, name, "test")},
        description=f"{name} of reasoning-gym",
    )


def _textarena(game: str) -> EnvSpec:
    from agentenv.envs.adapters.arena import TextArena, games, players_of
    from agentenv.envs.adapters.arena_seats import TextArenaSeats

    known = games()
    if game not in known:
        raise UnknownEnvironment(f"textarena has no game {game!r}", remedy=did_you_mean(game, known))
    players = players_of(game)
    if players == 1:
        tasks: dict[str, object] = {"train": train_seeds, "test": held_out_seeds}
        kwargs: dict[str, object] = {"game": game}
    else:
        tasks = {"train": partial(train_seats, players), "test": partial(held_out_seats, players)}
        kwargs = {"game": game, "players": players}
    return EnvSpec.of(
        f"textarena/{game}" if "-v" in game else f"textarena/{game}-v0",
        TextArena if players == 1 else TextArenaSeats,
        kwargs=kwargs,
        tasks=tasks,
        description=f"{game} of textarena" + (f", for {players} players" if players > 1 else ""),
    )


def _pettingzoo(game: str) -> EnvSpec:
    from agentenv.envs.adapters.petting import PettingZoo, seats_of

    seats = seats_of(game)
    name, _, version = game.rpartition("_v")
    return EnvSpec.of(
        f"pettingzoo/{name}-v{version}",
        PettingZoo,
        kwargs={"game": game},
        tasks={"train": partial(train_agents, seats), "test": partial(held_out_agents, seats)},
        description=f"{name} of PettingZoo, told in text",
    )


def _openenv(url: str) -> EnvSpec:
    """Return the specification of a server's environment, without connecting to the server."""
    from agentenv.envs.adapters.openenv import OpenEnv

    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"openenv:{url} has no server URL", remedy="write it as in openenv:http://127.0.0.1:8000"
        )
    name = "".join(char if char.isalnum() else "-" for char in url.partition("//")[2]).strip("-")
    return EnvSpec.of(
        f"openenv/{name}-v0",
        OpenEnv,
        kwargs={"source": url},
        tasks={"train": train_seeds, "test": held_out_seeds},
        description=f"the OpenEnv environment at {url}",
    )


def _verifiers(name: str) -> EnvSpec:
    from agentenv.envs.adapters.verifiers import Verifiers, rows, splits

    if not name:
        raise UsageError("verifiers: names no environment", remedy="write it as in verifiers:wordle")
    return EnvSpec.of(
        f"verifiers/{name.replace('/', '.')}-v0",
        Verifiers,
        kwargs={"source": name},
        tasks={split: partial(rows, name, split) for split in splits(name)},
        description=f"{name} of verifiers",
    )


def _bfcl(category: str) -> EnvSpec:
    from agentenv.envs.adapters.bfcl import MAX_TURNS, BfclMultiTurn, BfclSingleTurn
    from agentenv.envs.adapters.bfcl_data import MULTI_TURN, check_category, rows

    check_category(category)
    return EnvSpec.of(
        f"bfcl/{category}-v0",
        BfclMultiTurn if category in MULTI_TURN else BfclSingleTurn,
        tasks={"test": partial(rows, category)},
        max_turns=MAX_TURNS,
        description=f"{category} of the Berkeley Function-Calling Leaderboard",
    )


def _tau2(domain: str) -> EnvSpec:
    from agentenv.envs.adapters.tau2 import MAX_TURNS, Tau2, check_domain, rows, splits

    check_domain(domain)
    return EnvSpec.of(
        f"tau2/{domain}-v0",
        Tau2,
        kwargs={"domain": domain},
        tasks={split: partial(rows, domain, split) for split in splits(domain)},
        max_turns=MAX_TURNS,
        description=f"customer service of tau2, {domain}",
    )


def _agentdojo(suite: str) -> EnvSpec:
    from agentenv.envs.adapters.agentdojo import MAX_TURNS, AgentDojo, attacked_rows, rows
    from agentenv.envs.adapters.agentdojo_package import check_suite

    check_suite(suite)
    return EnvSpec.of(
        f"agentdojo/{suite}-v0",
        AgentDojo,
        kwargs={"suite": suite},
        tasks={"test": partial(rows, suite), "attacked": partial(attacked_rows, suite)},
        max_turns=MAX_TURNS,
        description=f"{suite} of AgentDojo, with and without an attacker",
    )


def _miniwob(page: str) -> EnvSpec:
    from agentenv.envs.adapters.miniwob import MAX_TURNS, MiniWob
    from agentenv.envs.adapters.miniwob_browser import check_page
    from agentenv.envs.adapters.miniwob_oracle import SOLVED, SolvedMiniWob

    check_page(page)
    return EnvSpec.of(
        f"miniwob/{page}-v0",
        SolvedMiniWob if page in SOLVED else MiniWob,
        kwargs={"page": page},
        tasks={"train": train_seeds, "test": held_out_seeds},
        max_turns=MAX_TURNS,
        description=f"the web page {page} of MiniWoB++",
    )


def _textworld(game: str) -> EnvSpec:
    from agentenv.envs.adapters.textworld import MAX_TURNS, TextWorld, held_out_tasks, train_tasks
    from agentenv.envs.adapters.textworld_games import settings_of

    settings_of(game)
    return EnvSpec.of(
        f"textworld/{game.replace('+', '.')}-v0",
        TextWorld,
        kwargs={"game": game},
        tasks={"train": partial(train_tasks, game), "test": partial(held_out_tasks, game)},
        max_turns=MAX_TURNS,
        description=f"text adventures of TextWorld, {game}",
    )


def _scienceworld(task: str) -> EnvSpec:
    from agentenv.envs.adapters.scienceworld import MAX_TURNS, SPLITS, ScienceWorld, rows
    from agentenv.envs.adapters.scienceworld_simulator import read_name

    read_name(task)
    return EnvSpec.of(
        f"scienceworld/{task.replace('+', '.')}-v0",
        ScienceWorld,
        kwargs={"task": task},
        tasks={split: partial(rows, task, split) for split in SPLITS},
        max_turns=MAX_TURNS,
        description=f"experiments of ScienceWorld, {task}",
    )


def _math(file: str) -> EnvSpec:
    from agentenv.envs.adapters.math_file import MathQuestions, rows

    DependencyMissing.require("math_verify", extra="math", purpose=f"math:{file}")
    tasks = rows(file)
    name = "".join(char if char.isalnum() else "-" for char in Path(file).stem).strip("-")
    return EnvSpec.of(
        f"math/{name or 'file'}-v0",
        MathQuestions,
        tasks=tasks,
        description=f"questions of mathematics in {Path(file).name}",
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """How environments of another library are named, and what they need."""

    spec: Callable[[str], EnvSpec]
    """Makes the specification of the name after the colon.

    It raises `UnknownEnvironment` if the package has no environment of this name, `DependencyMissing` if the
    package is not installed, and `UsageError` if the environment cannot be played, so that nobody learns this
    from failed episodes."""
    form: str
    """What stands after the colon, for lists."""
    modules: tuple[str, ...] = ()
    """Modules that must be installed."""
    install: str = ""
    """Command that installs them."""
    description: str = ""

    @property
    def missing(self) -> bool:
        """True if a module is not installed; nothing is imported to find out."""
        return any(find_spec(module) is None for module in self.modules)


PEERS: Mapping[str, Peer] = {
    "gymnasium": Peer(_gymnasium, "ID", description="text and small discrete environments of Gymnasium"),
    "reasoning_gym": Peer(
        _reasoning_gym,
        "NAME",
        ("reasoning_gym",),
        "pip install 'agentenv-rl[envs]'",
        "questions of reasoning-gym, with their verifiers",
    ),
    "textarena": Peer(
        _textarena,
        "GAME",
        ("textarena",),
        "pip install textarena",
        "games of textarena, for one player and more",
    ),
    "pettingzoo": Peer(
        _pettingzoo,
        "GAME",
        ("pettingzoo", "pygame", "rlcard"),
        "pip install 'agentenv-rl[pettingzoo]'",
        "tic-tac-toe, connect four, Leduc and Texas hold'em, rock-paper-scissors, for two players",
    ),
    "openenv": Peer(_openenv, "URL", description="environments on a server of OpenEnv"),
    "verifiers": Peer(
        _verifiers, "NAME", ("verifiers",), "pip install 'verifiers<0.4'", "environments of verifiers"
    ),
    "bfcl": Peer(
        _bfcl,
        "CATEGORY",
        ("bfcl_eval", "mpmath"),
        "pip install mpmath && pip install --no-deps bfcl-eval",
        "the Berkeley Function-Calling Leaderboard, multi-turn and single-turn",
    ),
    "tau2": Peer(
        _tau2,
        "DOMAIN",
        ("inspect_evals",),
        "pip install --no-deps inspect-evals",
        "customer service: retail, airline, telecom, banking_knowledge",
    ),
    "agentdojo": Peer(
        _agentdojo,
        "SUITE",
        ("agentdojo", "deepdiff", "email_validator", "yaml"),
        "pip install 'agentenv-rl[agentdojo]' && pip install --no-deps agentdojo",
        "assistants under attack: workspace, travel, banking, slack",
    ),
    "miniwob": Peer(
        _miniwob,
        "PAGE",
        ("miniwob", "playwright"),
        "pip install 'agentenv-rl[miniwob]' && pip install --no-deps miniwob",
        "small web pages of MiniWoB++, by accessibility tree and by screenshots",
    ),
    "textworld": Peer(
        _textworld,
        "GAME",
        ("textworld", "jericho", "tatsu"),
        "pip install 'agentenv-rl[textworld]' && pip install --no-deps jericho textworld",
        "text adventures of TextWorld: simple, coin_collector, treasure_hunter, cooking",
    ),
    "scienceworld": Peer(
        _scienceworld,
        "TASK",
        ("scienceworld", "py4j"),
        "pip install 'agentenv-rl[scienceworld]'",
        "experiments of ScienceWorld in a world of text, such as boil and find-animal",
    ),
    "math": Peer(
        _math,
        "FILE",
        ("math_verify",),
        "pip install 'agentenv-rl[math]'",
        "questions of mathematics in a file of JSON lines, scored by math-verify",
    ),
}
"""Libraries whose environments have names, by the prefix before the colon."""
