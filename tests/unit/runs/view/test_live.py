"""The live viewer tells its runs to whoever has the token, and to nobody else."""

from __future__ import annotations

import json
import re
import socket
from urllib.parse import urlsplit

import pytest

from helpers.live_viewer import fetch, live
from helpers.sample_runs import varied, write_run


def raw(server, data: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes."""
    address = urlsplit(server.address)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_the_page_and_its_episodes_are_given_with_the_token(tmp_path):
    write_run(tmp_path, "one", varied(2))
    with live(tmp_path) as server:
        status, page = fetch(server.url)
        shown = json.loads(re.search(r'id="page">(.*?)</script>', page)[1].replace("\\u0026", "&"))
        passed = f"&token={shown['token']}"
        found, data = fetch(f"{server.address}episode?run=one&place=3{passed}")

    assert (status, found) == (200, 200)
    assert '"live":true' in page
    assert json.loads(data)["vocab"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("", {}, 401),
        ("?token=wrong", {}, 401),
        ("episode?run=one&place=0", {}, 401),
        ("events?page=1", {}, 401),
        ("open?code=guessed", {}, 401),
        ("TOKEN", {"Host": "evil.example"}, 403),
        ("TOKEN", {"Origin": "http://evil.example"}, 403),
        ("TOKEN", {"Origin": "null"}, 403),
    ],
)
def test_nobody_else_is_told_anything(tmp_path, path, headers, status):
    write_run(tmp_path, "one", varied(2))
    with live(tmp_path) as server:
        told = fetch(server.address + path.replace("TOKEN", f"?token={server.guard.token}"), **headers)

    assert told[0] == status
    assert "script" not in told[1]


def test_what_does_not_exist_is_said(tmp_path):
    write_run(tmp_path, "one", varied(2))
    digits = "9" * 6_000
    bad = ("run=one&place=99", "run=../one&place=0", "", "run=one&place=%C2%B2", f"run=one&place={digits}")
    with live(tmp_path) as server:
        passed = f"&token={server.guard.token}"
        told = [fetch(f"{server.address}episode?{query}{passed}")[0] for query in bad]
        other = fetch(f"{server.address}etc/passwd?{passed}")[0]
        wrong = [fetch(server.url, method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")]

    assert (told, other, wrong) == ([404] * 5, 404, [405] * 4)


def test_the_address_on_the_browsers_command_line_works_once(tmp_path):
    write_run(tmp_path, "one", varied(2))
    with live(tmp_path) as server:
        address = server.url_to_open
        first, second = fetch(address), fetch(address)

    assert server.guard.token not in address
    assert (first[0], second[0]) == (200, 401)


def test_a_request_that_is_not_http_gets_a_4xx(tmp_path):
    wrong = (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G\r\n\r\n")
    with live(tmp_path) as server:
        answers = [raw(server, data) for data in wrong]

    assert [answer.split()[1][:1] for answer in answers] == [b"4"] * 3
    assert urlsplit(server.url).hostname == "127.0.0.1"
