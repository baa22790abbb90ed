"""Run directories: what was configured, every finished episode, and how to read it back.

A run directory holds `run.json` (what was run), `trajectories.jsonl` (one line for each finished
episode, only ever appended to), `index.jsonl` (a small summary of each line with its place in the
file), `metrics.jsonl`, what a trainer noted on episodes (`annotations.jsonl`, and
`token_annotations.jsonl` with one number for each token), the text of token ids (`vocab.jsonl` while it
is written, then `vocab.json`) and, where pyarrow is installed, `trajectories.parquet` after closing.

Rules kept here:

1. A finished episode is on disk before anything else happens with it; killing the process loses at
   most the line being written, and the next opening cuts that half line off.
2. `trajectories.jsonl` alone is the truth: the index is derived and rebuilt when it is missing or short.
3. Two processes never write one run; reading needs no lock and works while another process writes.
4. A run directory has no absolute paths in it that reading needs: it can be moved and copied.
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
    from agentenv.runs.store.index import index_line as index_line
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
    from agentenv.runs.store.summary import summarize as summarize
    from agentenv.runs.store.writer import RunWriter as RunWriter

__all__ = door(
    __name__,
    {
        "codec": ["decode_trajectory", "dumps", "encode_trajectory"],
        "index": ["EPISODES", "INDEX", "index_line"],
        "reader": ["Run", "find_run", "list_runs"],
        "runinfo": ["RunInfo", "RunStatus", "SCHEMA_VERSION"],
        "summary": ["EpisodeKey", "EpisodeSummary", "ToolUse", "answer_key", "summarize"],
        "writer": ["RunWriter"],
    },
)
