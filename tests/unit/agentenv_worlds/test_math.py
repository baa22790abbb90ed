"""Mathematical answers, compared by math-verify where that is installed."""

import json

import pytest

from agentenv.core import TaskError, UsageError
from agentenv.envs import spec
from agentenv.testing import check_env, oracle_of, play
from agentenv.tools import close_idle_workers
from agentenv_worlds.math.env import rows
from agentenv_worlds.math.reward import MathReward
from helpers.worlds import needs


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left():
    yield
    close_idle_workers()


def test_a_file_in_the_form_of_gsm8k_or_math_is_read(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"question": "1 + 1?", "answer": "One and one.\\n#### 2"}\n\n'
        '{"id": 7, "problem": "1 - 1?", "solution": "It is \\\\boxed{0}.", "level": 1}\n'
    )

    assert rows(str(path)) == [
        {"question": "1 + 1?", "solution": "One and one.\n#### 2"},
        {"id": "7", "question": "1 - 1?", "solution": "It is \\boxed{0}."},
    ]


@pytest.mark.parametrize("line", ['{"question": "x"}', '{"answer": 1}', "[]", "null"])
def test_a_line_that_is_no_question_is_named(tmp_path, line):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": 2}\n' + line + "\n")

    with pytest.raises(TaskError, match=r"line 2 of .*q\.jsonl is no question"):
        rows(str(path))
    with pytest.raises(TaskError, match=r"nothing\.jsonl cannot be read"):
        rows(str(tmp_path / "nothing.jsonl"))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("reference", "answer", "reward"),
    [
        ("She pays 72.\n#### 72", "so it is 72 dollars.", 1.0),
        ("#### 1,234", "The answer is 1234", 1.0),
        ("#### 72", "the answer is 71", 0.0),
        ("#### 72", "72 or 71? It is \\boxed{71}", 0.0),
        ("#### 72", "I will not say.", 0.0),
        ("#### 72", "", 0.0),
        ("#### 5", "<answer>5</answer>", 1.0),
        ("#### 5", "<answer>6</answer>, not 5", 0.0),
        ("0.5", "It is $\\frac{1}{2}$.", 1.0),
        ("\\frac{1}{2}", "<answer>1/2</answer>", 1.0),
        ("Hence $\\boxed{x^2+1}$.", "\\boxed{1+x^2}", 1.0),
        ("\\{1,2\\}", "<answer>\\{2,1\\}</answer>", 1.0),
        ("10\\%", "0.1", 1.0),
        ("7", "x" * 10_000 + " thus 7", 1.0),
        ("2^{10}", "2", 0.0),
        ("2^{10}", "\\boxed{1024}", 1.0),
        ("2^{10}", "<answer>2^10</answer>", 1.0),
        ("10^{-3}", "<answer>0.001</answer>", 1.0),
        ("10^{-3}", "10", 0.0),
        ("1024", "<answer>2^{10}</answer>", 1.0),
        ("1024", "The answer is 2^{10}.", 1.0),
        ("2", "The answer is 2^{10}.", 0.0),
        ("x_{max}+2", "2", 0.0),
        ("x_1 = 3", "\\boxed{3}", 1.0),
        ("{1,2}", "\\boxed{\\{2,1\\}}", 1.0),
        ("1_000", "1", 0.0),
        ("1_000", "It is 1,000.", 1.0),
        ("12", "<answer>12 cm^2</answer>", 1.0),
        ("", "7", None),
    ],
)
async def test_equal_values_are_right_however_they_are_written(reference, answer, reward):
    needs("math_verify")
    assert await MathReward(timeout_s=120)(answer, {"solution": reference}) == reward


@pytest.mark.engine
async def test_an_expression_that_takes_for_ever_is_wrong_and_the_next_one_is_read():
    needs("math_verify")
    reward = MathReward(timeout_s=2)

    assert await reward("$10^{10^{10^{10}}}$", {"solution": "7"}) == 0.0
    assert await MathReward(timeout_s=120)("7", {"solution": "7"}) == 1.0


@pytest.mark.engine
async def test_a_field_that_the_task_lacks_is_named():
    needs("math_verify")
    with pytest.raises(TaskError, match=r"no field 'solution'.*the task has: answer"):
        await MathReward()("7", {"answer": "7"})
    with pytest.raises(UsageError, match="must be positive"):
        MathReward(timeout_s=0)


@pytest.mark.engine
async def test_questions_like_those_of_gsm8k_are_played_from_a_file(tmp_path):
    needs("math_verify")
    made = pytest.importorskip("reasoning_gym").create_dataset("gsm_symbolic", seed=1, size=24)
    lines = [
        json.dumps({"question": row["question"], "answer": f"Therefore:\n#### {row['answer']}"})
        for row in made
    ]
    path = tmp_path / "gsm.jsonl"
    path.write_text("\n".join(lines))
    entry = spec(f"math:{path}")

    played = [await play(entry, oracle_of(entry), task) for task in entry.task_set()]

    assert [episode.reward for episode in played] == [1.0] * 24
    report = await check_env(f"math:{path}", tasks=3, timeout_s=600)
    assert report.ok, str(report)
