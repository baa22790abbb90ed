"""Every error says what was wrong and what to do, in fields and in one sentence."""

from __future__ import annotations

import pickle

import pytest

from agentenv.cli.errors import report_error
from agentenv.core import errors
from agentenv.core.errors import AgentEnvError, DependencyMissing, UsageError
from agentenv.core.imports import import_object
from agentenv.core.installed import install_line

KINDS = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_joins_message_and_remedy_and_survives_pickling(kind):
    error = kind("the table is full", remedy="clear it")
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is kind
    assert (again.message, again.remedy) == ("the table is full", "clear it")
    assert str(again) == str(error) == "the table is full; clear it"
    bare = kind("the table is full; all of it")
    assert (str(bare), bare.remedy, str(kind())) == ("the table is full; all of it", "", "")


def test_the_command_line_prints_fields_and_splits_no_sentence(capsys):
    report_error(AgentEnvError("one; two", remedy="do three; then four"), ["eval"])

    assert capsys.readouterr().err == "error: one; two\nwhere: agentenv eval\n  fix: do three; then four\n"


def test_a_missing_package_has_its_installation_as_remedy():
    error = DependencyMissing.of("torch", "train", purpose="training")

    assert (error.message, error.remedy) == ("training needs torch", install_line("train"))


def test_an_object_is_imported_by_module_and_name():
    assert import_object("agentenv.core.errors:AgentEnvError.message") is AgentEnvError.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("json", "of the form 'module:attr'"),
        ("json:", "of the form 'module:attr'"),
        ("no_such_module:x", "'no_such_module:x' cannot be loaded: No module named"),
        ("json:no.such", "'json:no.such' cannot be loaded: json has no 'no'"),
    ],
)
def test_an_object_that_is_not_there_is_refused_with_its_name_and_place(name, says):
    with pytest.raises(UsageError, match=f"--demos: .*{says}"):
        import_object(name, where="--demos")
