"""A run knows whether this user made it, and a run from elsewhere cannot pretend that."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agentenv.core import UsageError
from agentenv.runs.store import Run, RunStatus, RunWriter
from agentenv.runs.store.trust import executed_files, is_own, require_trust, signed


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without a key, in a directory with an environment file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def made(kind="eval", **values) -> Run:
    config = {"envs": ("shop.py", "agentenv/Calculator-v0"), "limits": {"max_turns": 3, "x": 0.1}}
    with RunWriter.create("shop.py", kind=kind, **{"config": config, "seed": 3, **values}) as writer:
        pass
    return Run(writer.path)


def edited(run: Run, **values) -> Run:
    """Return the run after somebody wrote into its run.json."""
    file = run.path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return Run(run.path)


def test_a_run_stays_its_users_own_while_it_is_resumed_and_moved(home):
    run = made()
    with RunWriter.resume(run.path) as writer:
        writer.expect(7)
        writer.close(RunStatus.INTERRUPTED, "stopped")
    moved = run.path.rename(home / "elsewhere")

    assert is_own(Run(moved).info)
    require_trust(Run(moved).info, trust=False, purpose="resuming")


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"envs": ["evil.py"]}},
        {"config": {"envs": ["shop.py"], "engine": {"base_url": "http://evil.example"}}},
        {"model": "hf:evil"},
        {"kind": "train"},
        {"kind": "import"},
        {"env_ids": ["evil/Env-v0"]},
        {"id": "another"},
        {"seed": 4},
        {"created": "2020-01-01"},
        {"directory": "/tmp"},
        {"signature": ""},
        {"signature": "0" * 64},
        {"signature": None},
        {"signature": {"a": []}},
        {"signature": "\ud800"},
        {"directory": 3},
        {"config": {"envs": 3}},
        {"config": {"envs": {"a": 1}}},
    ],
)
def test_a_run_that_somebody_changed_is_not_the_users_own(change):
    run = made()
    assert is_own(run.info)

    assert not is_own(edited(run, **change).info)


def test_a_run_of_another_user_needs_trust_and_the_error_names_the_file(home, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "attacker"))
    theirs = made()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    made()

    with pytest.raises(UsageError, match="--trust") as refused:
        require_trust(theirs.info, trust=False, purpose="resuming")
    require_trust(theirs.info, trust=True, purpose="resuming")

    assert str(home / "work" / "shop.py") in str(refused.value)


NAMES = ["a\0.py", "~nobody-has-this-name/a.py", "\x1b[2Jhidden.py", "a" * 5_000 + ".py", "\ud800.py"]
HOSTILE = [
    {"envs": NAMES},
    {"envs": {"\x1b[2J": 1}},
    {"envs": 3},
    {"envs": [[[]]], "deep": json.loads("[" * 700 + "]" * 700)},
]


@pytest.mark.parametrize("config", HOSTILE)
def test_hostile_settings_are_refused_in_words_that_a_terminal_can_show(config):
    run = edited(made(), config=config)

    with pytest.raises(UsageError, match="--trust") as refused:
        require_trust(run.info, trust=False, purpose="resuming")

    assert str(refused.value).isprintable()


def test_a_name_that_means_another_file_in_another_directory_needs_trust(home, monkeypatch):
    run, other = made(), home / "downloaded"
    absolute = made(config={"envs": [str(home / "work" / "shop.py")]})
    ids = made(config={"envs": ["agentenv/Calculator-v0"]})
    trained = made("train", config={"envs": {"shop.py:Shop": 1.0}})
    policy = made(config={"envs": ["agentenv/Calculator-v0"], "model": "policy:players.py:careful"})
    other.mkdir()
    monkeypatch.chdir(other)
    paths = [home / "work" / run.path for run in (run, absolute, ids, trained, policy)]

    assert [is_own(Run(path).info) for path in paths] == [False, True, True, False, False]
    assert executed_files(Run(paths[3]).info.config) == [str(other / "shop.py")]
    assert executed_files(Run(paths[4]).info.config) == [str(other / "players.py")]


def test_what_was_imported_is_never_signed():
    run = made("import")

    assert run.info.signature == ""
    assert not is_own(run.info)
    assert not is_own(replace(signed(replace(run.info, kind="eval")), kind="import"))


def test_the_key_is_private_and_a_key_that_others_can_read_does_not_count(home):
    run = made()
    file = home / "state" / "agentenv" / "run-key"

    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() not in (run.path / "run.json").read_text()
    file.chmod(0o644)
    assert not is_own(run.info)
    assert made().info.signature == ""
    file.chmod(0o600)
    for text in ("", "not hexadecimal", "00" * 8, "\xff"):  # signs nothing, as if it were broken off
        file.write_bytes(text.encode("latin-1"))
        assert made().info.signature == ""
        assert not is_own(run.info)


def test_without_a_key_no_run_is_the_users_own_and_none_is_made_to_see_that(home, monkeypatch):
    run = made()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "new"))
    assert not is_own(run.info)
    assert not (home / "new").exists()

    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    assert made().info.signature == ""
