"""Every Python block of the README and the documentation runs, in order, one namespace a page.

A block that cannot run here (it needs a GPU, an account or a server) stands behind the comment
`<!--- skip: next -->`; the reason is in the words before it.
"""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from agentenv.cli import VERBS, app
from agentenv.core.fields import tables
from agentenv.core.limits import RunLimits
from agentenv.core.settings import Section
from agentenv.engine import Sampling
from agentenv.runner import RunnerOptions
from agentenv.runs.eval_config import EvalConfig
from agentenv.training import GRPOConfig, LoraOptions

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
BLOCK = re.compile(r"^[ \t]*(?:```|~~~)[ \t]*py(?:thon)?\d?\b", re.M | re.I)
"""However a block of Python is fenced: what the parser does not find would never run."""
ENTRY = re.compile(r": (\S+\.md)$", re.M)
FILE = re.compile(r"`((?:agentenv|envs|tools|plugins|tests|examples|benchmarks|docs)/[\w/]+\.\w+)`")
"""A file that a page names; those that a user would write have other names."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
NAMING_FILES = [
    *(ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")),
    *PAGES,
]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_code_on_the_page_runs(page: Path):
    blocks = PythonCodeBlockParser()
    document = Document.parse(str(page), blocks, SkipParser())

    assert len(list(blocks(document))) == len(BLOCK.findall(page.read_text()))

    for example in document.examples():
        example.evaluate()


def test_links_between_pages_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in NAMING_FILES
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]

    assert broken == []


def test_one_table_says_of_forty_real_files_how_they_are_played():
    listed = runpy.run_path(str(ROOT / "benchmarks" / "real_files_list.py"))
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([^`]+)` \| (?:played|refused: |\d+ lines? changed)", page, re.MULTILINE)

    assert len(found) >= 40
    assert found == [listed["label"](file) for file in listed["FILES"]]


def words(page: Path) -> int:
    """Count words as `wc -w` does, the lines of tables too."""
    return len(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page", "most"),
    [
        ("README.md", 900),
        ("docs/tutorial.md", 600),
        ("docs/my-agent.md", 600),
        ("docs/benchmark.md", 600),
        ("docs/security.md", 1_600),
    ],
)
def test_the_pages_at_the_entrance_stay_short(page: str, most: int):
    assert words(ROOT / page) <= most


def test_the_guides_together_stay_short():
    assert sum(words(page) for page in PAGES[1:] if "reference" not in page.parts) <= 38_000


def test_the_table_of_settings_is_that_of_the_code():
    made = runpy.run_path(str(Path(__file__).with_name("settings.py")))

    same = made["PAGE"].read_text(encoding="utf-8") == made["page"]()
    assert same, "make it again: python tests/docs/settings.py"


def test_the_sites_menu_has_every_page_once():
    pages = [str(page.relative_to(ROOT / "docs")) for page in sorted((ROOT / "docs").glob("**/*.md"))]

    assert sorted(ENTRY.findall((ROOT / "mkdocs.yml").read_text())) == sorted(pages)


@pytest.mark.parametrize("page", NAMING_FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path):
    named = FILE.findall(page.read_text())

    assert [file for file in named if not (ROOT / file).exists()] == []


def test_names_of_code_on_the_pages_of_internals_exist():
    """Files by the end of their path, functions and classes by their last name."""
    library = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "agentenv").rglob("*.py")}
    code = set(re.findall(r"\w+", "\n".join(library.values())))
    pages = [ROOT / "docs" / "internals" / name for name in ("layout.md", "training.md", "walks.md")]
    named = {name for page in pages for name in re.findall(r"`([\w/.]+)`", page.read_text())}

    files = {name for name in named if name.endswith(".py")}
    lost = {name for name in files if not any(f"/{path}".endswith(f"/{name}") for path in library)}
    lost -= {name for name in lost if (ROOT / name).exists()}
    parts = {name for name in named - files if "/" not in name and "." in name}
    lost |= {name for name in parts if name.split(".")[-1] not in code}

    assert lost == set()


def test_the_tests_that_hold_promises_of_security_exist():
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)` `(test_\w+)`", page)

    assert named
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name == "reference" and ":::" in page.read_text(encoding="utf-8")],
    ids=lambda page: page.stem,
)
def test_the_reference_has_every_public_name_of_a_folder(page: Path):
    inside = f"agentenv.{page.stem.replace('-', '.')}"
    folder = f"agentenv_{page.stem}" if find_spec(inside) is None else inside
    listed = re.findall(rf"^::: {re.escape(folder)}\.(\w+)$", page.read_text(), re.M)

    assert sorted(listed) == sorted(import_module(folder).__all__)


def test_the_ten_commonest_jobs_are_found_from_the_front_page():
    """What a job of the page "How to" leads to is in a row of the front page, and its heading exists."""
    front = (ROOT / "docs" / "index.md").read_text()
    jobs = re.split(r"^## ", (ROOT / "docs" / "howto.md").read_text(), flags=re.M)[1:]

    lost = []
    for job in jobs:
        more = job.partition("More: ")[2].partition("\n")[0]
        targets = re.findall(r"\]\(([\w/-]+\.md)#?([\w-]*)\)", more)
        found = [
            file
            for file, anchor in targets
            if f"({file}#{anchor})" in front or (not anchor and f"({file})" in front)
        ]
        missing = [
            f"{file}#{anchor}" for file, anchor in targets if anchor and anchor not in anchors_of(file)
        ]
        lost += missing if found else [job.partition("\n")[0]]

    assert len(jobs) == 10
    assert lost == []


def anchors_of(file: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / file).read_text(), re.M)
    return {re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings}


SETTING = re.compile(r"""-o ['"]?(?:train\.(?=\w+\.))?(?:(?P<section>\w+)\.)?(?P<name>\w+)""")


def test_settings_of_the_command_line_that_a_page_shows_exist():
    sections = {
        "train": GRPOConfig,
        "lora": LoraOptions,
        "limits": RunLimits,
        "runner": RunnerOptions,
        "eval": EvalConfig,
        "sampling": Sampling,
    }
    sections |= {name: kind for name, kind in tables(GRPOConfig).items() if name not in sections}
    fields = {section: set(Section(kind).names) for section, kind in sections.items()}
    anywhere = set().union(*fields.values())
    unknown = [
        f"{page.name}: {shown[0]}"
        for page in PAGES
        for shown in SETTING.finditer(page.read_text(encoding="utf-8"))
        if shown["name"] not in fields.get(shown["section"], anywhere)
        and shown["section"] not in {"env", "engine"}
    ]

    assert unknown == []


LINE = re.compile(
    rf"(?:\bagentenv|python -m agentenv) ((?:{'|'.join(VERBS)})(?=[\s`])[^`\n]*(?:\\\n[^`\n]*)*)"
)
"""A command with its arguments, which may go on after a backslash."""


@pytest.mark.parametrize("page", NAMING_FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_options_of_every_command_on_a_page_exist(page: Path):
    group: Any = typer.main.get_command(app)
    context = group.make_context("agentenv", [], resilient_parsing=True)
    unknown: list[str] = []
    for line in LINE.findall(page.read_text(encoding="utf-8")):
        # What follows a pipe, a comment or a label such as `worst:` is no argument.
        words = re.split(r"\s(?:[#|&>(]|\S*: )", line.replace("\\\n", " "))[0].split()
        command = group.get_command(context, words.pop(0))
        while hasattr(command, "list_commands") and words and words[0] in command.list_commands(context):
            command = command.get_command(context, words.pop(0))
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        used = [re.split(r"[^\w-]", word)[0] for word in words if re.match("--?[a-z]", word)]
        unknown += [f"{name} in {line}" for name in used if name not in {*known, "--help", "--debug"}]

    assert unknown == []
