"""Which process computes which row: about as many tokens each, and every row exactly once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv.training.learners.torch.packing import plan
from agentenv.training.learners.torch.passes import destinations
from helpers.ranks import run_driver
from helpers.training import make_row

Lengths = list[list[int]]


def loads(lengths: Lengths, chosen: Lengths) -> list[int]:
    counted: Counter[int] = Counter()
    for own, targets in zip(lengths, chosen, strict=True):
        for length, target in zip(own, targets, strict=True):
            counted[target] += length
    return [counted[rank] for rank in range(len(lengths))]


def long_tailed(seed: int, processes: int) -> Lengths:
    """Episodes whose longest hundredth is five times as long as the median, with a limit at 32k."""
    random = Random(seed)
    return [
        [min(32_768, int(random.lognormvariate(8, 0.7)) + 1) for _ in range(16)] for _ in range(processes)
    ]


@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8]))
def test_with_long_tails_the_slowest_process_has_at_most_a_tenth_more_than_the_mean(seed, processes):
    lengths = long_tailed(seed, processes)
    found = loads(lengths, destinations(lengths))
    assert max(found) <= 1.1 * sum(found) / processes


@given(st.lists(st.lists(st.integers(1, 10_000), max_size=12), min_size=1, max_size=5))
def test_no_process_has_more_than_its_part_and_one_row(lengths):
    chosen = destinations(lengths)
    found = loads(lengths, chosen)
    assert sum(found) == sum(map(sum, lengths)), "every row is computed once"
    longest = max((length for own in lengths for length in own), default=0)
    mean = sum(found) / len(found)
    assert max(found) <= max(1.05 * mean, mean + longest)
    assert chosen == destinations(lengths), "all processes decide the same"


def test_rows_stay_where_they_are_if_the_processes_have_about_as_many_tokens():
    assert destinations([[50, 50], [30, 70], [102]]) == [[0, 0], [1, 1], [2]]


def test_a_process_without_rows_gets_some():
    lengths = [[9, 8, 7, 6, 5], []]
    found = loads(lengths, destinations(lengths))
    assert max(found) <= 1.1 * sum(found) / 2


def test_packs_are_filled_from_the_whole_batch():
    # In the order of their tokens, the first row fits beside the last one only.
    rows = [make_row([number, *range(length - 1)], [2]) for number, length in enumerate([60, 60, 30, 30])]
    packs = plan(rows, layout="shared", max_tokens=90)
    assert [pack.ids_BT.numel() for pack in packs] == [88, 88]
    assert Counter(id(row) for pack in packs for row in pack.rows) == Counter(map(id, rows))


DRIVER = """
from agentenv.core import TrajectoryGroup

LENGTHS = [[60, 3, 7, 4], [5, 9, 40, 6], [12, 3, 3, 8], [90, 2, 30, 11], [4, 4, 5, 20], [17, 33, 6, 3]]
AGAIN = {"beta": 0.3, "num_iterations": 2, "old_logprobs": "recompute"}
OPTIONS = {
    "plain": {},
    "batch": {"scale_rewards": "batch", "turn_discount": 1.0, "beta": 0.1},
    "sequences": AGAIN | {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_minibatches": 2},
    "reward": AGAIN | {"kl_in": "reward"}, "lora": AGAIN | {"lora": LoraOptions(r=4)},
    **{name: AGAIN | {"reduction": name, "max_completion_length": 90} for name in (
        "seq_mean", "constant", "prompt_mean")},
}


def group(number):
    members = LENGTHS[number]
    return TrajectoryGroup(tuple(
        episode(f"t{number}", n, float(n % 2) + n / 7, tokens=length) for n, length in enumerate(members)
    ))


def step(case, sharded):
    notes = []

    def noted(one, note):
        # The advantage of a reward with a KL in it is a sum whose order is that of the processes.
        notes.append((one.task_id, one.member, {**note, "advantage": round(note["advantage"], 12)}))

    trainer = GRPOTrainer(
        GRPOConfig(
            # With Adam's small epsilon a gradient that is zero but for rounding would move its weight.
            learning_rate=1e-3, dtype="float64", tokens_per_micro_batch=70, fsdp=sharded, adam_epsilon=1e-4,
            **OPTIONS[case],
        ),
        model=tiny_gpt2(), callbacks=Callbacks(on_trained=noted),
    )
    world, policy = trainer.world, trainer.learner.policy
    # The first process played most groups, and the third none.
    first = {1: [0], 2: [0, 5], 4: [0, 3, 5, 5]}[world.size] + [len(LENGTHS)]
    computed, score = [], policy.score
    def counted(micro):
        if not micro.idle and torch.is_grad_enabled():
            computed.append(sum(len(row.token_ids) for row in micro.rows))
        return score(micro)
    policy.score = counted
    metrics = trainer.step([group(number) for number in range(first[world.rank], first[world.rank + 1])])
    loads = world.gather([sum(computed)])
    notes = world.gather(notes)
    name = f"{OUT}/{case}-{world.size}-{sharded}"
    keep(trainer, name)
    if world.rank == 0:
        timeless = {name: value for name, value in metrics.items() if "time" not in name and "packing" not in name}
        with open(f"{name}.json", "w") as file:
            json.dump({"metrics": timeless, "notes": notes, "loads": loads}, file)


def steps(sharded, cases):
    for case in cases:
        step(case, sharded)


play(lambda: steps(False, OPTIONS), 1)
for sharded in (False, True):
    play(lambda: steps(sharded, OPTIONS), 2)
    play(lambda: steps(sharded, ["plain", "sequences"]), 4)
"""


CASES = "plain", "batch", "sequences", "reward", "lora", "seq_mean", "constant", "prompt_mean"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("balance")
    run_driver(DRIVER, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in CASES), ("plain", 4), ("sequences", 4)])
@pytest.mark.parametrize("sharded", [False, True])
def test_balanced_processes_make_the_step_of_one(found, case, size, sharded):
    one, several = (torch.load(found / f"{case}-{name}") for name in ("1-False", f"{size}-{sharded}"))
    assert (several - one).norm() <= 1e-12 * one.norm()
    alone, together = (
        json.loads((found / f"{case}-{name}.json").read_text()) for name in ("1-False", f"{size}-{sharded}")
    )
    assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-9, abs=1e-12)
    assert together["notes"] == alone["notes"], "scores of moved rows come back to their episodes"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_compute_about_as_many_tokens_whoever_played_the_episodes(found, size):
    told = json.loads((found / f"plain-{size}-True.json").read_text())
    assert max(told["loads"]) <= 1.1 * sum(told["loads"]) / size
