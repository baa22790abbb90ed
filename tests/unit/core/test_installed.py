"""Lines that install more of a package name the place that the package came from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from agentenv.core.installed import dependency, install_line

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def origin(tmp_path, monkeypatch):
    """Let the installer have noted an origin for a package `shop`; None for a package from an index."""

    def note(found):
        info = tmp_path / "shop-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
        if found is not None:
            (info / "direct_url.json").write_text(found if isinstance(found, str) else json.dumps(found))
        monkeypatch.syspath_prepend(str(tmp_path))
        assert metadata.version("shop") == "1.0"

    return note


@pytest.mark.parametrize("noted", [None, "{broken", {"url": "file:///has/gone", "dir_info": {}}])
def test_a_release_is_named_by_its_name(origin, noted):
    origin(noted)

    assert install_line("train", package="shop") == "pip install 'shop[train]'"
    assert dependency(package="shop") == "shop"


def test_a_clone_is_named_by_its_path_and_by_a_dot_inside_it(origin, tmp_path, monkeypatch):
    clone = tmp_path / "my clone"
    clone.mkdir()
    origin({"url": clone.as_uri(), "dir_info": {"editable": True}})

    assert install_line("train", package="shop") == f"pip install -e '{clone}[train]'"
    assert dependency(package="shop") == f"shop @ {clone.as_uri()}"
    monkeypatch.chdir(clone)
    assert install_line("train", package="shop", more="x") == (
        "pip install -e '.[train]' && pip install --no-deps x"
    )


def test_a_repository_and_a_file_are_named_by_their_address(origin, tmp_path):
    origin({"url": "https://host/shop", "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    assert install_line("train", package="shop") == (
        f"pip install 'shop[train] @ git+https://host/shop@{COMMIT}'"
    )
    wheel = tmp_path / "shop-1.0-py3-none-any.whl"
    wheel.touch()
    origin({"url": wheel.as_uri(), "archive_info": {}})
    assert install_line("train", package="shop") == f"pip install 'shop[train] @ {wheel.as_uri()}'"


def test_a_package_that_is_not_installed_has_its_plain_name():
    assert (
        install_line("train", package="no-such-package-here") == "pip install 'no-such-package-here[train]'"
    )


@given(st.sampled_from(["", "train", "train,dev"]))
def test_what_a_package_depends_on_is_a_requirement_that_resolves_here(extra):
    wanted = Requirement(dependency(extra))

    assert (wanted.name, wanted.extras) == ("agentenv-rl", set(filter(None, extra.split(","))))
    assert wanted.url is None or Path(wanted.url.removeprefix("file://")).exists()
