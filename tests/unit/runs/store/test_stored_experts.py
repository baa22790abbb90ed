"""The experts of a sequence survive the disk, in both forms in which sequences are written."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from agentenv.core import RoutedExperts, TokenSpan
from agentenv.runs.store import decode_trajectory, encode_trajectory
from agentenv.runs.store.codec import encode_line, loads
from helpers.training import episode


def with_experts(kind: str):
    made = episode("a", 0, 1.0)
    sequence = made.sequences[0]
    ids = np.random.default_rng(0).integers(0, 200, (len(sequence) - 1, 3, 2)).astype(kind)
    return replace(made, sequences=(replace(sequence, routed_experts=RoutedExperts.of(ids)),))


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_experts_are_read_as_they_were_written(kind):
    made = with_experts(kind)

    assert decode_trajectory(loads(encode_line(made))) == made
    assert decode_trajectory(json.loads(json.dumps(encode_trajectory(made)))) == made


def test_experts_stand_beside_ids_that_do_not_fit_the_packed_form():
    made = with_experts("uint8")
    large = TokenSpan("prompt", (2**40,))
    made = replace(made, sequences=(replace(made.sequences[0], spans=(large, *made.sequences[0].spans)),))

    assert decode_trajectory(loads(encode_line(made))) == made


def test_a_record_without_experts_does_not_name_them():
    assert b"routed_experts" not in encode_line(episode("a", 0, 1.0))


@pytest.mark.parametrize(
    "damaged", ["x", {"ids": "!"}, {"ids": "AAAA", "layers": 0, "choices": 1, "width": 1}]
)
def test_damaged_experts_are_a_value_error(damaged):
    data = json.loads(encode_line(with_experts("uint8")))
    data["sequences"][0]["routed_experts"] = damaged

    with pytest.raises(ValueError, match=r"episode|bytes|base64"):
        decode_trajectory(data)
