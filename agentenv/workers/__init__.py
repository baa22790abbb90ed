"""Workers play the episodes of a run in other processes and on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.workers.crew import Crew as Crew
    from agentenv.workers.episode_worker import EpisodeWorker as EpisodeWorker
    from agentenv.workers.episode_worker import Order as Order
    from agentenv.workers.episode_worker import Played as Played
    from agentenv.workers.recipe import Recipe as Recipe
    from agentenv.workers.start import check_workers as check_workers
    from agentenv.workers.start import crew_of as crew_of
    from agentenv.workers.worker import Worker as Worker
    from agentenv.workers.worker import WorkerLost as WorkerLost

__all__ = door(__name__)
