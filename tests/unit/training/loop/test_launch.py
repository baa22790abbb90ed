"""What processes of a launch send each other through the store is plain data."""

from __future__ import annotations

import pickle
from itertools import count
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from agentenv.training.loop.launch import Launch


def process(rank: int, store: object) -> Launch:
    """One of two processes at a store, without the process group that torchrun starts."""
    launch = object.__new__(Launch)
    launch.is_first = rank == 0
    vars(launch).update(
        _world=SimpleNamespace(rank=rank, size=2), _store=store, _sent=count(), _collected=[0, 0]
    )
    return launch


def test_values_arrive_in_order():
    store = dist.HashStore()
    first, second = process(0, store), process(1, store)

    second.send(("append", "an episode\ud800 漢", {}))
    second.send(
        ("annotate", "an episode", {"step": 1, "entropy": [0.1, 1e-9, float("inf")], "advantage": None})
    )

    assert list(first.collect()) == [
        ["append", "an episode\ud800 漢", {}],
        ["annotate", "an episode", {"step": 1, "entropy": [0.1, 1e-9, float("inf")], "advantage": None}],
    ]
    assert list(first.collect()) == []


def test_a_pickle_in_the_store_is_not_loaded(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    store = dist.HashStore()
    store.set("1/0", pickle.dumps(Hostile()))

    with pytest.raises(ValueError, match=r"codec|Expecting"):
        list(process(0, store).collect())
    assert not (tmp_path / "opened").exists()
