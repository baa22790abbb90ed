"""A directory that others wrote can be removed, and nothing beside it is touched."""

from __future__ import annotations

from agentenv.core.trees import remove_tree


def test_directories_that_nobody_may_write_to_are_removed(tmp_path):
    deep = tmp_path / "top" / "cache" / "deep"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    for folder in (deep, deep.parent):
        folder.chmod(0o500)

    remove_tree(tmp_path / "top")

    assert list(tmp_path.iterdir()) == []


def test_what_a_link_names_stays_as_it_is(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    kept.chmod(0o500)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(kept)

    remove_tree(tmp_path / "top")

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").read_text() == "x"
    assert kept.stat().st_mode & 0o777 == 0o500
