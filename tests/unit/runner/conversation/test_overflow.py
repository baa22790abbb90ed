"""What is kept of output that is too long, what becomes of the rest, and cuts that need several tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import RunLimits, ToolResult, UsageError
from agentenv.runner.conversation.fit import TurnAnswer, cut, fit_answer
from agentenv.runner.outputs import FullOutputs, file_name
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import RENDERER, Tools
from scenes import play as play_in_scene

LINES = "".join(f"line {number}\n" for number in range(200))


class Logs(Tools):
    @tool
    def log(self) -> str:
        "Show the log."
        return LINES


async def play(script, **settings):
    return await play_in_scene(Logs(), [*script, "done"], group_id="test/Logs-v0:a b", member=2, **settings)


LOG, SHORT = tool_call("log"), tool_call("echo", text="ok")


def missing(text: str) -> int:
    return int(text.split("... [")[1].split(" characters cut;", maxsplit=1)[0])


def marker(cut_chars: int) -> str:
    return f"... [{cut_chars} characters cut; to see them, ask for a smaller part] ..."


@pytest.mark.parametrize("keep", ["head", "tail"])
async def test_the_end_that_is_wanted_is_kept_up_to_the_limit(keep):
    record = await play([LOG], max_tool_output_tokens=120, tool_output_keep=keep)

    (result,) = record.turns[0].tool_results
    kept = len(LINES) - missing(result.text)
    assert result.text.startswith(LINES[:kept]) if keep == "head" else result.text.endswith(LINES[-kept:])
    assert RENDERER.count(result.text) == 120, "not one token is given away"
    assert (result.trimmed, result.full_chars) == (True, len(LINES))
    assert record.messages[2]["content"] == result.text
    assert record.sequences[0].loss_mask.count(True) == record.num_sampled_tokens


@pytest.mark.parametrize("keep", ["head", "middle", "tail"])
async def test_what_is_cut_at_the_context_s_edge_is_counted_from_the_whole(keep):
    whole = await play([SHORT])
    room = len(whole.sequences[0]) + 150

    limits = {"max_tool_output_tokens": 400, "max_context_tokens": room, "tool_output_keep": keep}
    record = await play([LOG], **limits)

    (result,) = record.turns[0].tool_results
    head, tail = result.text.split(marker(missing(result.text)))
    assert len(head.rstrip("\n")) + len(tail.lstrip("\n")) <= len(LINES) - missing(result.text) + 2
    assert (len(head) > 1, len(tail) > 1) == (keep != "tail", keep != "head")
    assert missing(result.text) > len(LINES) - 200
    assert len(record.sequences[0]) <= room
    assert record.stop_reason == "final_answer"


@given(
    st.text(alphabet=st.sampled_from("ab é\n漢😀"), max_size=300),
    st.integers(min_value=0, max_value=200),
    st.sampled_from(["head", "tail", "middle"]),
)
def test_a_cut_never_exceeds_its_tokens_and_keeps_what_fits(text, limit, keep):
    kept = cut(text, limit, RENDERER, keep)

    assert RENDERER.count(kept) <= limit
    if RENDERER.count(text) <= limit:
        assert kept == text
    elif "characters cut;" in kept and keep != "middle":
        chars = len(text) - missing(kept)
        more = text[: chars + 1] if keep == "head" else text[-chars - 1 :]
        one_more = f"{marker(len(text) - chars - 1)}\n{more}"
        assert RENDERER.count(one_more) > limit, "one character more would not fit"


def test_of_a_huge_output_only_its_end_is_looked_at():
    class Counting:
        longest = 0

        def count(self, text):
            self.longest = max(self.longest, len(text))
            return len(text)

        def trim(self, text, max_tokens):
            raise AssertionError("the middle is not asked for")

    measure = Counting()

    kept = cut("x" * 5_000_000 + "end", 100, measure, "tail")

    assert kept.endswith("xend")
    assert len(kept) == 100
    assert measure.longest < 2_000


def test_of_two_limits_the_wish_that_is_no_default_holds():
    head, tail, plain = (RunLimits(tool_output_keep=keep) for keep in ("head", "tail", "middle"))

    assert plain.stricter(tail).tool_output_keep == "tail"
    assert head.stricter(plain).tool_output_keep == "head"
    assert head.stricter(tail).tool_output_keep == "head"
    with pytest.raises(UsageError, match="tool_output_keep"):
        RunLimits(tool_output_keep="ends")


# A cut that still does not fit ------------------------------------------------------------


class Characters:
    """One token for each character; cuts to the head, without a marker."""

    def count(self, text):
        return len(text)

    def trim(self, text, max_tokens):
        return text[: max(max_tokens, 0)]


def observe(*texts):
    return TurnAnswer(tuple(ToolResult(str(n), "f", text) for n, text in enumerate(texts)))


def fit(texts, room, price):
    """Fit contents into a room where a render costs 10 tokens and `price(text)` for each content."""
    rendered = []

    def render(answer):
        rendered.append(answer)
        return [0] * (10 + sum(map(price, answer.texts)))

    found = fit_answer(observe(*texts), render, Characters(), room=room, max_output_tokens=None)
    return found, len(rendered)


@pytest.mark.parametrize(
    ("room", "price", "left"),
    [
        # In its frame the content takes a tenth more tokens than by itself, so it is cut again by what is over.
        (110, lambda text: len(text) + len(text) // 10, range(80, 92)),
        # What costs more the shorter it is leaves only the frame, and so does what never fits.
        (60, lambda text: 400 if text else 0, range(1)),
        (110, lambda text: 101 if text else 0, range(1)),
    ],
)
def test_a_cut_that_still_does_not_fit_is_cut_again_a_bounded_number_of_times(room, price, left):
    found, renders = fit(["x" * 500], room, price)

    assert found is not None
    fitted, ids = found
    assert len(ids) <= room
    assert len(fitted.texts[0]) in left
    assert (fitted.results[0].trimmed, fitted.results[0].full_chars) == (True, 500)
    assert 2 < renders <= 10


@given(
    st.lists(st.integers(min_value=0, max_value=300), min_size=1, max_size=4),
    st.integers(min_value=0, max_value=400),
    st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=5),
)
def test_whatever_the_frame_does_to_contents_the_result_fits(sizes, room, extra):
    def price(text):
        return len(text) + extra[len(text) % len(extra)] if text else 0

    found, _ = fit(["x" * size for size in sizes], room, price)

    if room < 10:
        assert found is None
    else:
        assert found is not None
        assert len(found[1]) <= room


# The whole on disk ------------------------------------------------------------------------


async def test_the_whole_of_what_was_cut_is_kept_on_disk_if_asked_for(tmp_path):
    script = [SHORT + LOG + LOG]

    record = await play(script, full_outputs=tmp_path / "outputs", max_tool_output_tokens=100)
    plain = await play(script, max_tool_output_tokens=100)

    short, first, second = record.turns[0].tool_results
    assert short.full_output == ""
    assert (tmp_path / "outputs" / first.full_output).read_text() == LINES
    assert (tmp_path / "outputs" / second.full_output).read_text() == LINES
    names = sorted(path.name for path in tmp_path.rglob("*.txt"))
    assert names == ["turn-000-call-2.txt", "turn-000-call-3.txt"]
    assert record.messages == plain.messages, "the model is shown the same"
    assert plain.turns[0].tool_results[1].full_output == ""


async def test_a_disk_that_refuses_takes_no_episode_down(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")

    record = await play([LOG], full_outputs=tmp_path / "file", max_tool_output_tokens=100)

    assert record.stop_reason == "final_answer"
    assert record.turns[0].tool_results[0].full_output == ""
    assert "could not be written" in caplog.text


def test_files_are_named_by_their_episode_and_stay_in_the_directory(tmp_path):
    names = {file_name(name) for name in ("a/b", "a_b", "a b", "../..", "", "x" * 300, "é")}

    path = FullOutputs(tmp_path).keep("../../outside", 3, 0, "lone \ud800 surrogate")

    assert len(names) == 7
    assert all("/" not in name and not name.startswith(".") and len(name) < 100 for name in names)
    assert (tmp_path / path).resolve().is_relative_to(tmp_path.resolve())
    assert (tmp_path / path).read_bytes() == b"lone \xed\xa0\x80 surrogate"
