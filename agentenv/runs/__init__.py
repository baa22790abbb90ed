"""Runs: evaluate models, store the episodes on disk, and report, compare, replay and view them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.runs.capture import CaptureServer as CaptureServer
    from agentenv.runs.capture import capture_agents as capture_agents
    from agentenv.runs.compare import Comparison as Comparison
    from agentenv.runs.compare import compare as compare
    from agentenv.runs.eval_config import EvalConfig as EvalConfig
    from agentenv.runs.evaluate import evaluate as evaluate
    from agentenv.runs.evaluate import rollout as rollout
    from agentenv.runs.evaluation import EvalResult as EvalResult
    from agentenv.runs.evaluation import Evaluation as Evaluation
    from agentenv.runs.formats import Export as Export
    from agentenv.runs.formats import Format as Format
    from agentenv.runs.formats import format_registry as format_registry
    from agentenv.runs.recorded import renderer_of as renderer_of
    from agentenv.runs.replay import Replay as Replay
    from agentenv.runs.replay import replay_episode as replay_episode
    from agentenv.runs.report import EvalReport as EvalReport
    from agentenv.runs.report import report_on as report_on
    from agentenv.runs.stats import Interval as Interval
    from agentenv.runs.stats import pass_at_k as pass_at_k
    from agentenv.runs.store.reader import Run as Run
    from agentenv.runs.store.reader import find_run as find_run
    from agentenv.runs.store.reader import list_runs as list_runs
    from agentenv.runs.store.summary import EpisodeSummary as EpisodeSummary
    from agentenv.runs.store.summary import summarize as summarize
    from agentenv.runs.store.writer import RunWriter as RunWriter
    from agentenv.runs.verify.verify import verify_episode as verify_episode
    from agentenv.runs.verify.verify import verify_run as verify_run
    from agentenv.runs.view.page import show as show

__all__ = door(__name__)
