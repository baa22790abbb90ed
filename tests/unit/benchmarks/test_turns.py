"""Turns of other libraries' tests are found in their sources, and what we read otherwise needs a reason."""

import json

import pytest

from agreement import llama_cpp_turns, turns
from helpers.call_formats import CALL_FORMATS

SOURCE = r"""
static common_chat_tool act{
    /* .name = */ "act",
    /* .description = */ "Acts.",
    /* .parameters = */ R"({"type": "object", "properties": {"city": {"type": "string"}}})",
};
const common_chat_msg said = simple_assist_msg("Hello,\n\"world\"!");
void test() {
    auto tst = peg_tester("models/templates/hermes.jinja", debug);
    tst.test("Hello,\n" + std::string("\"world\"!")).expect(said).run(); // text
    tst.test("<tool_call>\n"
             "{\"name\": \"act\", \"arguments\": {\"city\": \"Lima\"}}</tool_call>")
        .tools({ act }).enable_thinking(false).expect_tool_calls({ { "act", R"({"city": "Lima"})", {} } }).run();
    tst.test("half").is_partial(true).expect(said).run();
    tst.test(unknown).expect(said).run();
}
"""


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test-chat.cpp").write_text(SOURCE)
    (tmp_path / "hermes.jinja").write_text(CALL_FORMATS["hermes"])
    return list(llama_cpp_turns.recorded(tmp_path))


def test_cases_of_whole_turns_are_read_out_of_the_source(rows):
    assert [(row["text"], row["calls"], row["content"]) for row in rows] == [
        ('Hello,\n"world"!', [], 'Hello,\n"world"!'),
        (
            '<tool_call>\n{"name": "act", "arguments": {"city": "Lima"}}</tool_call>',
            [["act", '{"city": "Lima"}']],
            "",
        ),
    ]
    assert rows[1]["tools"][0]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert rows[1]["kwargs"] == {"enable_thinking": False}


def test_a_turn_that_is_read_otherwise_needs_a_reason(rows, tmp_path, monkeypatch):
    oslo = rows[1]["text"].replace("Lima", "Oslo")
    other = {**rows[1], "text": oslo, "calls": [["act", '{"city": "Rome"}']]}
    elsewhere = {**rows[0], "family": "unknown"}

    result = turns.compare([*rows, other, elsewhere], [tmp_path])

    assert (result.equal, len(result.differ), result.left_out) == (2, 1, {"unknown": 1})
    (said,) = result.unexplained
    reasons = tmp_path / "reasons.json"
    reasons.write_text(json.dumps({"a city": [said.partition(":")[0]]}))
    monkeypatch.setattr(turns, "REASONS", reasons)
    assert turns.compare([other], [tmp_path]).unexplained == []


def test_a_turn_counts_where_sglang_reads_what_the_tests_expect(rows, tmp_path):
    wrong = {**rows[1], "calls": [["act", '{"city": "Rome"}']]}
    agreed = {**wrong, "sglang": [["act", '{ "city": "Rome" }']]}
    alone = {**wrong, "text": wrong["text"] + "\n", "sglang": []}

    result = turns.compare([agreed, alone], [tmp_path])

    assert (len(result.differ), result.alone, result.equal) == (1, 1, 0)
