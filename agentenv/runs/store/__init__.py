"""Run directories: writing a run's configuration and episodes to disk, and reading them back.

A run directory contains these files:

- `run.json`: the configuration, the versions and the status of the run.
- `trajectories.jsonl`: one line for each finished episode. Lines are only ever appended.
- `index.jsonl`: a small summary of each of these lines, with its position in the file.
- `metrics.jsonl`: the metrics of each training step.
- `workers.jsonl`: how the driver and each worker were doing, every ten seconds; only with workers.
- `servers.jsonl`: how each server of the engine was doing, every ten seconds; only with vLLM servers.
- `annotations.jsonl` and `token_annotations.jsonl`: values that a trainer recorded for an episode, and
  for each token of an episode.
- `vocab.jsonl` while the run is written, `vocab.json` once it is closed: the text of the token ids.

The store follows four rules:

1. A finished episode is written to disk before it is used for anything else. Killing the process loses at
   most the line that is being written, and the next writer removes that incomplete line.
2. `trajectories.jsonl` is the only source of truth. The index is derived from it and is rebuilt when it is
   missing or incomplete.
3. Only one process writes a run. Reading needs no lock and works while another process writes.
4. Reading a run needs no absolute paths, so a run directory can be moved and copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.runs.store.codec import decode_trajectory as decode_trajectory
    from agentenv.runs.store.codec import dumps as dumps
    from agentenv.runs.store.codec import encode_trajectory as encode_trajectory
    from agentenv.runs.store.index import EPISODES as EPISODES
    from agentenv.runs.store.index import INDEX as INDEX
    from agentenv.runs.store.reader import Run as Run
    from agentenv.runs.store.reader import find_run as find_run
    from agentenv.runs.store.reader import list_runs as list_runs
    from agentenv.runs.store.runinfo import SCHEMA_VERSION as SCHEMA_VERSION
    from agentenv.runs.store.runinfo import RunInfo as RunInfo
    from agentenv.runs.store.runinfo import RunStatus as RunStatus
    from agentenv.runs.store.summary import EpisodeKey as EpisodeKey
    from agentenv.runs.store.summary import EpisodeSummary as EpisodeSummary
    from agentenv.runs.store.summary import ToolUse as ToolUse
    from agentenv.runs.store.summary import answer_key as answer_key
    from agentenv.runs.store.summary import index_line as index_line
    from agentenv.runs.store.summary import summarize as summarize
    from agentenv.runs.store.writer import RunWriter as RunWriter

__all__ = door(__name__)
