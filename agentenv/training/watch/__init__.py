"""Reports on a training run: metrics, warnings, trackers, and notes for the viewer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.watch.bounds import busiest_bound as busiest_bound
    from agentenv.training.watch.notes import episode_notes as episode_notes
    from agentenv.training.watch.track import Trackers as Trackers
    from agentenv.training.watch.warn import early_warnings as early_warnings

__all__ = door(__name__)
