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


ANY = Guard(host="0.0.0.0", allowed_hosts=("Box.Internal",))
NUMBERS = ("10.0.0.1:8000", "[fe80::1]:1", "127.0.0.1", "localhost", "box.internal:8000")
HOSTS = [
    *((Guard(), host, 0) for host in OURS),
    *((Guard(), host, 403) for host in LOOKALIKES + OTHERS),
    *((ANY, host, 0) for host in NUMBERS),
    *((ANY, host, 403) for host in ("evil.example", "")),
]


@pytest.mark.parametrize(("guard", "host", "status"), HOSTS)
def test_a_server_answers_to_its_own_names_and_to_no_other(guard, host, status):
    assert refused(guard.check_source, {"Host": host}) == status


ORIGINS = ("http://127.0.0.1:9000", "http://localhost:8000", "http://evil.example", "null", "")
ORIGINS += ("file://127.0.0.1:8000", "http://[")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        *((f"{scheme}://127.0.0.1:8000", 0) for scheme in ("http", "https")),
        *((origin, 403) for origin in ORIGINS),
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
    error = pickle.loads(pickle.dumps(Refused(429, "too many", remedy="wait")))
    assert (error.status, error.message, error.remedy) == (429, "too many", "wait")


FORMS = ("text/plain", "", "multipart/form-data", "application/x-www-form-urlencoded")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        *(("application/json", 0), ("Application/JSON; charset=utf-8", 0)),
        *((form, 415) for form in (*FORMS, "text/plain;application/json")),
    ],
)
def test_a_body_must_have_the_type_that_is_read(given, status):
    assert refused(Guard().check_content_type, {"Content-Type": given}) == status


NO_JSON = [
    *("", "{", "[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "[" * 101 + "]" * 101, "NaN", "-Infinity"),
    *(b"\xff\xfe", b'"\xc3"', '"\\ud800"', '{"\\udfff": 1}', "9" * 5_000),
]


@pytest.mark.parametrize("text", NO_JSON, ids=lambda text: str(text)[:9])
def test_what_is_not_json_is_refused_in_words(text):
    with pytest.raises(UsageError, match="JSON"):
        parse_json(text)
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json('"\\ud83d\\ude00"') == "😀"
    assert parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
