"""What a prompt shows of results: one line of each, and the table of `agentenv eval` when printed."""

from agentenv import evaluate
from agentenv.core.sequence import TokenSequence, TokenSpan
from agentenv.core.visible import MAX_CHARS, one_line
from agentenv.runs import compare
from agentenv.testing.checker import CheckReport, Finding

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


def test_a_line_is_cut_and_what_is_unknown_is_left_out():
    assert one_line(3, None, "", "a\nb", 0.5) == "int(a b, 0.5)"
    assert len(one_line(3, "x" * 500)) == MAX_CHARS


def test_a_printed_result_is_the_table_of_the_command(command, tmp_path):
    result = evaluate(ENV, num_tasks=2)
    said = command("eval", ENV, "-m", "mock", "-n", "2", "--runs-dir", str(tmp_path))

    assert str(result).splitlines()[0] in said.out


def test_a_function_of_the_caller_gets_each_finished_episode():
    told = []

    result = evaluate(ENV, num_tasks=3, on_episode=told.append)

    assert {one.key: one for one in told} == {one.key: one for one in result.summaries}
