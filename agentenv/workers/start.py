"""Make the crew that a run asks for: none, local processes, or Ray actors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.workers.servers import num_servers_of
from agentenv.workers.worker import refuse_in_worker

if TYPE_CHECKING:
    from agentenv.envs.spec import EnvSpec
    from agentenv.workers.crew import Crew
    from agentenv.workers.recipe import Recipe
    from agentenv.workers.reports import Tell
    from agentenv.workers.worker import Worker

__all__ = ["check_workers", "crew_of", "require_cluster"]


def check_workers(workers: int, ray: str, model: str) -> None:
    """Check what a run says about its workers, before anything is loaded or connected.

    Args:
        workers: number of workers; 0 plays in this process.
        ray: address of a Ray cluster, or `auto`; empty for processes of this machine.
        model: engine string of the run.

    Raises:
        UsageError: The settings exclude each other, or the model cannot be used by workers.
        DependencyMissing: Ray is named and is not installed.
    """
    if ray and not workers:
        raise UsageError(
            f"ray={ray!r} names a cluster, but no workers", remedy="say how many as well (--workers 8)"
        )
    if not workers:
        return
    # Only runs with workers load this, which costs as much as the model of a small evaluation.
    from agentenv.workers.recipe import require_remote

    refuse_in_worker()
    require_remote(model)
    if ray:
        DependencyMissing.require("ray", extra="ray", purpose="playing on a Ray cluster")


def require_cluster(ray: str, worker_env: Sequence[str], ray_options: Mapping[str, Any]) -> None:
    """Connect to the cluster of a run, so that one that cannot be used is refused before the run begins.

    Raises:
        UsageError: It cannot be reached, an option is unknown, or a variable is not set.
    """
    importlib.import_module("agentenv.workers.on_ray").join(ray, worker_env, ray_options)


def crew_of(
    recipe: Recipe,
    specs: Sequence[EnvSpec],
    *,
    workers: int,
    ray: str = "",
    tell: Tell | None = None,
    tell_servers: Tell | None = None,
    worker_env: Sequence[str] = (),
    ray_options: Mapping[str, Any] | None = None,
) -> Crew:
    """Return the crew of a run; it starts when it is entered.

    Args:
        recipe: what the workers open.
        specs: the environments of the recipe, in its order.
        workers: number of workers.
        ray: address of a Ray cluster, or `auto`; empty for processes of this machine.
        tell: called from time to time with how the driver and each worker are doing.
        tell_servers: called from time to time with how each server of the engine is doing.
        worker_env: names of environment variables that Ray actors get; local processes have all.
        ray_options: options of Ray for each actor.
    """
    from agentenv.workers.crew import Crew
    from agentenv.workers.handshake import Handshake
    from agentenv.workers.local import LocalWorker

    check_workers(workers, ray, recipe.model)
    text, num_servers = recipe.to_json(), num_servers_of(recipe.model)
    handshake = Handshake(specs)
    if ray:
        hire, head = importlib.import_module("agentenv.workers.on_ray").hire(
            ray, text, workers, handshake, worker_env=worker_env, options=ray_options
        )
        return Crew(
            hire, workers, specs, tell, num_servers=num_servers, tell_servers=tell_servers, beside=head
        )

    def hire_process(name: str, beside: bool) -> Worker:
        return LocalWorker(text, name, handshake)

    return Crew(hire_process, workers, specs, tell, num_servers=num_servers, tell_servers=tell_servers)
