"""Which requests a server of ours answers."""

from __future__ import annotations

import pickle

import pytest

from agentenv.core import UsageError
from agentenv.core.serving import Guard, Refused, new_token, parse_json

TOKEN = "a-token-of-24-characters"


def refused(check, *given, **options) -> int:
    """Return the status with which a check refuses; 0 if it does not."""
    try:
        check(*given, **options)
    except Refused as error:
        return error.status
    return 0


OURS = ("127.0.0.1", "127.0.0.1:80", "127.9.9.9:1", "localhost", "LOCALHOST:8000", "[::1]:8000", "[::1]")
LOOKALIKES = ("127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example", "0x7f000001")
OTHERS = ("", "evil.example", "10.0.0.1", "[::1", "evil.example:8000", "127.0.0.1 evil.example", "[]")


@pytest.mark.parametrize(
    ("host", "status"), [*((host, 0) for host in OURS), *((host, 403) for host in LOOKALIKES + OTHERS)]
)
def test_a_server_on_loopback_answers_to_loopback_and_to_no_other_name(host, status):
    assert refused(Guard().check_source, {"Host": host}) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[
            (host, 0)
            for host in ("10.0.0.1:8000", "[fe80::1]:1", "127.0.0.1", "localhost", "box.internal:8000")
        ],
        *[(host, 403) for host in ("evil.example", "")],
    ],
)
def test_a_server_for_other_machines_answers_to_numbers_and_known_names_only(host, status):
    guard = Guard(host="0.0.0.0", allowed_hosts=("Box.Internal",))

    assert refused(guard.check_source, {"Host": host}) == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 0),
        ("https://127.0.0.1:8000", 0),
        ("http://127.0.0.1:9000", 403),
        ("http://localhost:8000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://127.0.0.1:8000", 403),
        ("http://[", 403),
    ],
)
def test_a_page_of_another_origin_is_not_answered(origin, status):
    assert refused(Guard().check_source, {"Host": "127.0.0.1:8000", "Origin": origin}) == status


@pytest.mark.parametrize(
    ("headers", "more", "status"),
    [
        ({"Authorization": f"Bearer {TOKEN}"}, {}, 0),
        ({"Authorization": f"bearer  {TOKEN}"}, {}, 0),
        ({"X-API-Key": TOKEN}, {}, 0),
        ({"X-Access-Token": TOKEN}, {}, 0),
        ({}, {"query": TOKEN}, 0),
        ({"X-Access-Token": "of one box"}, {"others": ["of one box"]}, 0),
        ({}, {}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, {}, 401),
        ({"Authorization": TOKEN}, {}, 401),
        ({"X-API-Key": TOKEN[:-1]}, {}, 401),
        ({"X-API-Key": f"{TOKEN}é"}, {}, 401),
        ({}, {"others": [""]}, 401),
    ],
)
def test_the_token_may_come_in_each_header_that_clients_use(headers, more, status):
    assert refused(Guard(token=TOKEN).check_token, headers, **more) == status


def test_a_server_without_a_token_lets_everyone_act_and_listens_on_loopback_only():
    for host in ("127.0.0.1", "::1", "localhost"):
        assert refused(Guard.of(host, "").check_token, {}) == 0
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "box.internal"):
        with pytest.raises(UsageError, match="it has no token"):
            Guard.of(host, "")
        assert Guard.of(host, None).token


@pytest.mark.parametrize("token", ["short", "has a space in between", "ends with a line\n", "é" * 20])
def test_a_token_that_is_weak_or_cannot_be_sent_is_refused(token):
    with pytest.raises(UsageError, match="the token must have at least 16"):
        Guard(token=token)


def test_tokens_are_new_each_time_and_stay_out_of_texts():
    guard = Guard()

    assert len({new_token() for _ in range(8)}) == 8
    assert guard.token not in repr(guard)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("application/json", 0),
        ("Application/JSON; charset=utf-8", 0),
        ("text/plain", 415),
        ("", 415),
        ("multipart/form-data", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain;application/json", 415),
    ],
)
def test_a_body_must_have_the_type_that_is_read(given, status):
    assert refused(Guard().check_content_type, {"Content-Type": given}) == status


def test_a_refusal_keeps_its_status_and_remedy_between_processes():
    error = pickle.loads(pickle.dumps(Refused(429, "too many", remedy="wait")))

    assert (error.status, error.message, error.remedy) == (429, "too many", "wait")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        "[" * 101 + "]" * 101,
        "NaN",
        "-Infinity",
        b"\xff\xfe",
        b'"\xc3"',
        '"\\ud800"',
        '{"\\udfff": 1}',
        "9" * 5_000,
    ],
)
def test_what_is_not_json_is_refused_in_words(text):
    with pytest.raises(UsageError, match="JSON"):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[" * 100 + "]" * 100, None),
        ('"\\ud83d\\ude00"', "😀"),
        (b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
    ],
)
def test_json_is_read(text, value):
    assert value is None or parse_json(text) == value
    parse_json(text)
