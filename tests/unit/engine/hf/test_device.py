"""A device that is not here is refused with the remedy, before anything is loaded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from agentenv.core import UsageError  # noqa: E402
from agentenv.engine.hf.load import pick_device  # noqa: E402 - needs torch


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none_is_refused_by_name(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(UsageError, match=f"device '{device}' cannot be used.*leave device out"):
        pick_device(device)


def test_auto_is_the_processor_where_there_is_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert pick_device("auto") == "cpu"
