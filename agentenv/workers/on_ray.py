"""Workers that are actors of a Ray cluster. This is the only module that imports Ray.

1. Ray only places processes and carries messages. Which worker plays what, and what happens when one dies, is
   decided by the crew, as for every other kind of worker; Ray restarts no actor and repeats no call.
2. An actor that cannot be reached counts as dead and is killed, so that an episode that is played again is
   not also played on by an actor that was only unavailable.
3. Records return by value with the call's result; nothing else is put into Ray's object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.core.faults import class_of, message_of
from agentenv.core.visible import logger
from agentenv.engine.interface import Completion
from agentenv.workers.episode_worker import EpisodeWorker, Order, OrderKey, Played
from agentenv.workers.handshake import Handshake
from agentenv.workers.head import Head, let_ray_wait
from agentenv.workers.silence import answers, last_answer
from agentenv.workers.worker import ClusterLost, Worker, WorkerLost, mark_as_worker, require_played

__all__ = ["hire", "join"]

_ray: Any = ray
_log = logger(__name__)

MAX_CONCURRENCY = 50_000
"""Calls that an actor serves at the same time. Ray's default of 1000 would limit the live episodes."""
PLACED_S = 1800.0
"""Time in which an actor has to start; a cluster that grows needs minutes for a new node."""
OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "label_selector", "runtime_env")
"""Options of Ray that a run may set for its workers."""
HEAD_S = 4.0
"""Time limit for a connection to the head of a cluster."""
CLOSE_S = 60.0
"""Time limit for a worker to close its environments; it is killed after that."""


class _Actor:
    """The process of a worker."""

    def __init__(self, recipe: str, name: str) -> None:
        mark_as_worker()
        self._worker = EpisodeWorker(recipe, name)

    async def open(self) -> tuple[str, str, dict[str, str]]:
        """Open the recipe; return the node, what went wrong, and what this process plays with."""
        node = f"{socket.gethostname()} ({_ray.util.get_node_ip_address()})"
        try:
            await self._worker.__aenter__()
        except Exception as error:  # noqa: BLE001 - opening imports the author's code; the driver is told
            return node, f"{class_of(error)}: {message_of(error)}", {}
        return node, "", self._worker.parts()

    async def play(self, key: int, order: Order) -> Played | None:
        return await self._worker.play(key, order)

    async def cancel(self, key: int) -> None:
        self._worker.cancel(key)

    async def expect_weights(self, version: int, run: str) -> None:
        self._worker.expect_weights(version, run)

    async def stats(self) -> dict[str, Any]:
        return self._worker.stats()

    async def turns(self) -> dict[OrderKey, dict[str, Completion]]:
        return self._worker.turns()

    async def close(self) -> None:
        await self._worker.__aexit__()


class RayWorker:
    """A Ray actor that plays episodes; see `agentenv.workers.worker.Worker`.

    Args:
        recipe: JSON text of the recipe.
        name: name of the worker.
        handshake: refuses a worker that plays with something else than this process.
        head: watches the head of the cluster.
        options: options of Ray for the actor.
    """

    def __init__(
        self, recipe: str, name: str, handshake: Handshake, head: Head, options: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._head = head
        self._recipe = recipe
        self._handshake = handshake
        self._options = options
        self._keys = itertools.count()
        self._actor: Any = None
        self._why = ""

    async def start(self) -> None:
        """Place the actor and wait until the recipe is open in it; see `Worker.start`."""
        options = {
            **self._options,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "scheduling_strategy": "SPREAD",
        }
        self._actor = _ray.remote(_Actor).options(**options).remote(self._recipe, self.name)
        node, failure, parts = await self._placed(self._actor.open.remote())
        if failure:
            raise UsageError(f"worker {self.name} on {node} cannot open this run: {failure}")
        self._handshake.require(parts, self.name, node)

    async def _placed(self, opening: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(PLACED_S):
                return await self._answer(opening)
        except TimeoutError:
            raise UsageError(
                f"worker {self.name} had no place in the Ray cluster for {PLACED_S / 60:.0f} minutes",
                remedy="ask for fewer workers, or add nodes to the cluster",
            ) from None

    async def play(self, order: Order) -> Played:
        """Play an episode; see `Worker.play`."""
        key = next(self._keys)
        answer = asyncio.ensure_future(self._answer(self._actor.play.remote(key, order)))
        try:
            return require_played(self, await asyncio.shield(answer))
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLost, ClusterLost):
                self._actor.cancel.remote(key)
                played = await last_answer(self, answer)
                if played is not None:
                    return played
            raise

    async def expect_weights(self, version: int, run: str) -> None:
        """Tell the worker's engine which weights its servers have now, and which training pushed them."""
        await self._answer(self._actor.expect_weights.remote(version, run))

    async def stats(self) -> dict[str, Any]:
        """Return how the worker is doing; see `Worker.stats`."""
        return await self._answer(self._actor.stats.remote())

    async def turns(self) -> dict[OrderKey, dict[str, Completion]]:
        """Return the completions of long episodes since the last call; see `Worker.turns`."""
        return await self._answer(self._actor.turns.remote())

    def kill(self, why: str) -> None:
        """End the process at once; see `Worker.kill`."""
        if self._actor is not None:
            self._why = why
            _ray.kill(self._actor)

    async def close(self) -> None:
        """Let the worker close its environments, and end the process."""
        if self._actor is None:
            return
        if await answers(self):
            with contextlib.suppress(TimeoutError, AgentEnvError):
                async with asyncio.timeout(CLOSE_S):
                    await self._answer(self._actor.close.remote())
        _ray.kill(self._actor)
        self._actor = None

    async def _answer(self, called: Awaitable[Any]) -> Any:
        """Return the result of a call.

        Raises:
            WorkerLost: The actor or its node died, or cannot be reached.
            ClusterLost: The head of the cluster has gone.
            Exception: What the call raised.
        """
        try:
            return await self._head.answer(called)
        except _ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else AgentEnvError(str(error)) from None
        except _ray.exceptions.RayError as error:
            how = self._why or f"cannot be reached: {str(error).strip().partition(chr(10))[0]}"
            raise WorkerLost(f"worker {self.name} (Ray) {how}") from error


def join(address: str, worker_env: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Connect to a cluster, and return the options of each actor; the arguments are those of `hire`.

    Raises:
        UsageError: The cluster cannot be reached, an option is unknown, or a variable is not set.
    """
    actor = _actor_options(worker_env, options)
    if not _ray.is_initialized():
        _connect(address)
    return actor


def hire(
    address: str,
    recipe: str,
    workers: int,
    handshake: Handshake,
    *,
    worker_env: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[Callable[[str, bool], Worker], Head]:
    """Connect to a cluster, and look whether the workers have room in it.

    Args:
        address: `auto`, `HOST:PORT` of the cluster's head, or `local` for a new cluster of this machine.
        recipe: JSON text of the recipe.
        workers: number of workers.
        handshake: refuses workers that play with something else than this process.
        worker_env: names of environment variables of this process that the actors get.
        options: options of Ray for each actor; see `OPTIONS`.

    Returns:
        What makes a worker, and the watch over the cluster's head, which is open while there are workers.

    Raises:
        UsageError: The cluster cannot be reached, an option is unknown, or a variable is not set.
    """
    actor = join(address, worker_env, options or {})
    there, free = (int(found().get("CPU", 0)) for found in (_ray.cluster_resources, _ray.available_resources))
    needed = workers * actor["num_cpus"]
    if needed > there:
        _log.warning(
            "the Ray cluster %s has %d CPUs, too few for %d workers of %g each: they wait until it grows; if "
            "it does not, ask for fewer workers",
            *(address, there, workers, actor["num_cpus"]),
        )
    elif needed > free:
        _log.warning("only %d CPUs of the Ray cluster are free; %d workers wait for others", free, workers)
    _warn_if_open()
    # A worker beside the places reserves no processor: it replaces one that has just died.
    lone = {**actor, "num_cpus": 0}
    head = Head(str(_ray.get_runtime_context().gcs_address))
    return lambda name, beside: RayWorker(recipe, name, handshake, head, lone if beside else actor), head


def _actor_options(worker_env: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of each actor; its environment variables have values of this process."""
    if unknown := sorted(given.keys() - OPTIONS):
        raise UsageError(
            f"ray_options has {unknown[0]!r}, which is no option of a worker",
            remedy=f"use {', '.join(OPTIONS)}",
        )
    if unset := [name for name in worker_env if name not in os.environ]:
        raise UsageError(
            f"worker_env names {unset[0]}, which is not set here", remedy=f"export {unset[0]}=..."
        )
    runtime: dict[str, Any] = dict(given.get("runtime_env") or {})
    passed = {name: os.environ[name] for name in worker_env}
    if paths := os.environ.get("PYTHONPATH"):
        passed["PYTHONPATH"] = paths
    variables = {**passed, **runtime.get("env_vars", {})}
    return {"num_cpus": 1, **given, "runtime_env": {**runtime, "env_vars": variables}}


def _connect(address: str) -> None:
    if address.startswith("ray://"):
        raise UsageError(
            f"{address} is an address of Ray Client, which loses the run when its connection breaks",
            remedy="run the command on a machine of the cluster (ray job submit), with --ray auto",
        )
    _require_head(address)
    let_ray_wait()
    try:
        _ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
    except Exception as error:
        first = message_of(error).strip().partition("\n")[0]
        raise UsageError(
            f"the Ray cluster {address} cannot be used: {class_of(error)}: {first}",
            remedy="start one (ray start --head); use the versions of Ray and Python that it has; if it "
            "wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH",
        ) from error


def _require_head(address: str) -> None:
    """Look whether anything listens at the address of a cluster, which Ray itself tries for two minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_S).close()
    except OSError as error:
        raise UsageError(
            f"no Ray cluster answers at {address}: {error}",
            remedy="start one (ray start --head), name the head of another one with --ray, or play in "
            "processes of this machine with --workers alone",
        ) from error


def _warn_if_open() -> None:
    """Warn if whoever reaches the cluster's ports may run code in it."""
    host = str(_ray.get_runtime_context().gcs_address).rpartition(":")[0]
    if os.environ.get("RAY_AUTH_MODE") == "token" or host in {"127.0.0.1", "localhost", "::1"}:
        return
    _log.warning(
        "the Ray cluster at %s listens beyond this machine without authentication, so whoever reaches its "
        "ports can run code in it; start it with RAY_AUTH_MODE=token, or on a private network",
        host,
    )
