"""The doctor says what each tier holds on this kernel, and what it leaves open."""

from __future__ import annotations

from agentenv_jail.tiers import promises


def test_the_landlock_tier_says_what_it_leaves_open():
    promised = promises("landlock", abi=7, release="6.18.1")

    assert any("disk and threads, counted" in text for text in promised.holds)
    assert any("can be seen" in text for text in promised.leaves_open)


def test_old_kernels_leave_more_open():
    new = promises("namespace", abi=7, release="6.18.44-fc-v657").leaves_open

    assert not any("Landlock" in text or "per user" in text for text in new)
    assert any("no Landlock" in text for text in promises("namespace", abi=0, release="6.1.0").leaves_open)
    assert any("per user" in text for text in promises("namespace", abi=1, release="5.13.0-37").leaves_open)
