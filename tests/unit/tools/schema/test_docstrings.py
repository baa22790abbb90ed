"""Docstrings of every style say the same, and none is a reason to fail."""

from __future__ import annotations

import pytest

from agentenv.tools.schema import read_docstring

GOOGLE = """Do it.

    More about it: much more.

    Args:
        x (int, optional): The first,
            over two lines.
        *rest: The rest.
        **options: Options.

    Returns:
        The thing.
    """
NUMPY = """Do it.

    More about it: much more.

    Parameters
    ----------
    x : int, optional
        The first,
        over two lines.
    *rest
        The rest.
    **options
        Options.

    Returns
    -------
    int
        The thing.
    """
REST = """Do it.

    More about it: much more.

    :param x: The first,
        over two lines.
    :param rest: The rest.
    :param options: Options.
    :returns: The thing.
    """
EPYDOC = """Do it.

    More about it: much more.

    @param x: The first,
        over two lines.
    @param rest: The rest.
    @param options: Options.
    @return: The thing.
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, REST, EPYDOC], ids=["google", "numpy", "rest", "epydoc"])
def test_every_style_gives_the_same_reading(text: str) -> None:
    doc = read_docstring(text)

    assert doc.description == "Do it.\n\nMore about it: much more."
    assert {name: entry.description for name, entry in doc.parameters.items()} == {
        "x": "The first, over two lines.",
        "rest": "The rest.",
        "options": "Options.",
    }
    assert doc.returns == "The thing."


@pytest.mark.parametrize(
    ("text", "description", "choices"),
    [
        ('What (choices: ["tea", " coffee "])', "What", ("tea", "coffee")),
        ("What (Choices: [1, 2.5, true, null])", "What", (1, 2.5, True, None)),
        ("What (choices: [tea])", "What (choices: [tea])", ()),
        ("What (choices: 3)", "What (choices: 3)", ()),
        ('Old (choices: ["a"]) or new', 'Old (choices: ["a"]) or new', ()),
    ],
)
def test_closing_choices_are_read(text: str, description: str, choices: tuple[object, ...]) -> None:
    entry = read_docstring(f"Do.\n\nArgs:\n    x: {text}\n").parameters["x"]

    assert (entry.description, entry.choices) == (description, choices)


ODD = [
    "Just text",
    "Note: a colon",
    "Usage::\n\n    code()",
    ":",
    "Args:",
    "Args:\n    no colon here",
    "@",
    ":param",
]


@pytest.mark.parametrize("text", [*ODD, "Parameters\n----------"])
def test_odd_docstrings_never_fail(text: str) -> None:
    doc = read_docstring(text)

    assert isinstance(doc.description, str)
    assert all(isinstance(told, str) for told in dict(doc.parameters).values())


def test_no_docstring_says_nothing_and_numpy_names_may_share_a_description() -> None:
    for text in (None, "", "  \n "):
        doc = read_docstring(text)
        assert (doc.description, dict(doc.parameters), doc.returns) == ("", {}, "")

    doc = read_docstring("Do.\n\nParameters\n----------\nx, y : int\n    Both.\n")
    assert [doc.parameters[name].description for name in ("x", "y")] == ["Both.", "Both."]
