"""JSON of strangers is counted before it is made, because the parser holds everybody up until it is done."""

from __future__ import annotations

import json

import pytest

from agentenv.core.errors import UsageError
from agentenv.core.serving.body import MAX_VALUES, parse_json, parse_json_beginning


@pytest.mark.parametrize("value", ["1", '"a"', "{}", "[]"])
@pytest.mark.parametrize("parse", [parse_json, parse_json_beginning])
def test_more_values_than_anybody_sends_are_refused(value, parse):
    text = "[" + ",".join([value] * (MAX_VALUES + 1)) + "]"

    with pytest.raises(UsageError, match="more than 500,000 values"):
        parse(text)
    with pytest.raises(UsageError, match="more than 500,000 values"):
        parse_json(text.encode())


def test_a_table_inside_of_a_text_is_one_value():
    table = '1,[{"a\\' * MAX_VALUES

    assert parse_json(json.dumps([table])) == [table]
    assert parse_json_beginning(json.dumps([table]) + "rest")[0] == [table]


def test_quotation_marks_that_nothing_closes_are_read_once():
    with pytest.raises(UsageError, match="not JSON"):
        parse_json(b'"' + b'\\",' * 2 * MAX_VALUES)
