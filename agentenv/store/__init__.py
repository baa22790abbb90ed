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

from agentenv.store.codec import decode_trajectory, encode_trajectory
from agentenv.store.reader import Run, find_run, list_runs
from agentenv.store.runinfo import SCHEMA_VERSION, RunInfo, RunStatus
from agentenv.store.summary import EpisodeKey, EpisodeSummary, ToolUse, answer_key, summarize
from agentenv.store.writer import RunWriter

__all__ = [
    "SCHEMA_VERSION",
    "EpisodeKey",
    "EpisodeSummary",
    "Run",
    "RunInfo",
    "RunStatus",
    "RunWriter",
    "ToolUse",
    "answer_key",
    "decode_trajectory",
    "encode_trajectory",
    "find_run",
    "list_runs",
    "summarize",
]
