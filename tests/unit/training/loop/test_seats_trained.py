"""A policy that plays all seats of a game is trained on every seat, in steps and as a stream."""

import pytest

from agentenv.core import RunLimits
from agentenv.envs import MultiEnv
from scenes import spec_of, trainer


class Longest(MultiEnv):
    """Two players say something; the longer text wins."""

    seats = ("a", "b")
    system_prompt = "Say."

    def start(self, task, seed):
        self.said = []

    def turn(self):
        return None if len(self.said) == 2 else self.seats[len(self.said)]

    def observe(self, seat):
        return seat

    def act(self, seat, text):
        self.said.append(text)

    def rewards(self):
        first, second = map(len, self.said)
        return {"a": 1.0 if first > second else -1.0, "b": -1.0 if first > second else 1.0}


def trained(tmp_path, **options):
    played, tasks = [], [{"id": str(n), "seat": "ab"[n % 2]} for n in range(4)]
    training = trainer(
        tmp_path,
        envs=spec_of(Longest, tasks, kwargs={"opponents": "self"}),
        limits=RunLimits(max_turns=2, max_tokens_per_turn=60),
        on_trajectory=played.append,
        learning_rate=0.01,
        stop=tuple(
            map(chr, range(32, 127))
        ),  # the weights are drawn, so a turn ends with any printable character
        **options,
    )
    return training.train(), played


@pytest.mark.parametrize("options", [{}, {"max_ahead": 2}])
def test_every_seat_is_a_group_of_the_batch(tmp_path, options):
    history, played = trained(tmp_path, **options)

    assert len(history) == 3
    groups = {}
    for one in played:
        groups.setdefault(one.group_id, []).append(one)
    seats = [{one.task["seat"] for one in members} for members in groups.values()]
    assert all(len(own) == 1 for own in seats)
    assert sum(own == {"a"} for own in seats) >= 6
    assert sum(own == {"b"} for own in seats) >= 6
    # Two tasks a step, each a group of two for each of two seats.
    assert {metrics["episodes"] for metrics in history} == {8.0}, sorted(history[0])
