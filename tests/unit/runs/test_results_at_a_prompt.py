"""What a prompt and a notebook show of results: one line of each, the table of `agentenv eval`, and pages."""

import pytest

from agentenv import evaluate
from agentenv.core import UsageError
from agentenv.core.sequence import TokenSequence, TokenSpan
from agentenv.core.visible import MAX_CHARS, one_line
from agentenv.runs import compare, show
from agentenv.testing.checker import CheckReport, Finding
from agentenv.training import TrainResult

ENV = "agentenv/Calculator-v0"


def test_results_are_one_short_line_at_a_prompt(tmp_path):
    result = evaluate(ENV, num_tasks=2, group_size=2, runs_dir=tmp_path)
    held = evaluate(ENV, num_tasks=2, group_size=2)
    sequence = TokenSequence((TokenSpan("prompt", tuple(range(4000))),))
    report = CheckReport(ENV, tuple(Finding(f"check-{n}", "problem", "x" * 200) for n in range(40)))
    episode = held.groups[0][0]

    shown = [result, held, held.report, held.groups[0], episode, sequence, sequence.spans[0], report]
    shown += [result.run, held.summaries[0], compare(result.run, result.run)]

    assert "2 of 240 tasks of the split test" in repr(held.report)
    for one in shown:
        assert "\n" not in repr(one)
        assert len(repr(one)) <= MAX_CHARS
        assert repr(one).startswith(f"{type(one).__name__}(")
    assert one_line(3, None, "", "a\nb", 0.5) == "int(a b, 0.5)"
    assert len(one_line(3, "x" * 500)) == MAX_CHARS


def test_whatever_was_played_can_be_shown_in_a_notebook(tmp_path):
    stored, memory = (evaluate(ENV, num_tasks=2, group_size=2, runs_dir=path) for path in (tmp_path, None))
    trained = TrainResult((), stored.run, steps_done=1, checkpoint=None)
    group = memory.groups[0]

    for what in (stored, stored.run, trained, memory, memory.groups, group, group[0]):
        assert ENV in show(what).page
    for what in (TrainResult((), None, steps_done=1, checkpoint=None), []):
        with pytest.raises(UsageError, match="there are no episodes to show"):
            show(what)


def test_a_printed_result_is_the_table_of_the_command(command, tmp_path):
    result = evaluate(ENV, "scripted:no", num_tasks=2, group_size=2)
    said = command("eval", ENV, "-m", "scripted:no", "-n", "2", "-k", "2", "--runs-dir", str(tmp_path))

    assert str(result).splitlines()[0] in said.out
    assert str(result.report).splitlines()[-1].startswith("reward   mean 0.000 [")
    assert "stops    final_answer 4" in str(result.report)
    assert "! all episodes of each task have the same reward" in str(result.report)


def test_a_function_of_the_caller_gets_each_finished_episode():
    told = []

    result = evaluate(ENV, num_tasks=3, on_episode=told.append)

    assert {one.key: one for one in told} == {one.key: one for one in result.summaries}
