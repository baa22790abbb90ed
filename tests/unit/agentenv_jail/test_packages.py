"""Packages that the code may import, and those that it may not see."""

from __future__ import annotations

import pytest

from agentenv.sandbox import SandboxLimits, create

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
LIMITS = SandboxLimits(address_space_bytes=3 << 30, timeout_s=30)


async def test_a_package_comes_with_what_it_needs_and_nothing_else():
    pytest.importorskip("sympy")
    async with create("auto", size=1, limits=LIMITS, packages=["sympy"]) as sandbox:
        result = await sandbox.run_code("import sympy\nprint(sympy.integrate(sympy.Symbol('x')))")
        other = await sandbox.run_code("import pydantic")

    assert result.stdout == "x**2/2\n", result.stderr
    assert "No module named 'pydantic'" in other.stderr


async def test_preloaded_numpy_draws_new_numbers_each_time():
    pytest.importorskip("numpy")
    async with create("auto", size=2, limits=LIMITS, preload=["numpy"]) as sandbox:
        code = "import numpy\nprint(numpy.random.rand(), numpy.linalg.det(numpy.eye(3)))"
        results = [await sandbox.run_code(code) for _ in range(4)]

    assert all(result.ok for result in results), results[0].stderr
    assert len({result.stdout for result in results}) == 4
    assert results[0].stdout.endswith("1.0\n")
