"""`agentenv plan`: print what a training would need on the GPUs of a machine, without a GPU and weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import ConfigOption, JsonOption, SettingsOption
from agentenv.core.errors import UsageError
from agentenv.core.settings import build, parse_pairs, read_settings, read_toml

if TYPE_CHECKING:
    from agentenv.placement import CapacityPlan, Placement
    from agentenv.training.config import GRPOConfig

__all__ = ["run"]


_GIGA = 1e9


def run(
    model: str = typer.Option(
        ..., "-m", "--model", help="A causal model, as in hf:PATH, of which only the config is read."
    ),
    context: str = typer.Option("8k", "--context", help="Longest episode in tokens, such as 32k."),
    gpus: str = typer.Option("1x80", "--gpus", help="Number of GPUs and gigabytes of each, such as 8x80."),
    settings: list[str] = SettingsOption,
    config: str = ConfigOption,
    as_json: bool = JsonOption,
) -> None:
    """Print what each GPU of a training would hold, whether it fits, and the nearest thing that does.

    Everything is computed from the model's config: no weights are read, and no GPU is needed. Settings for
    -o are those of train: train.lora.r=16, train.gradient_checkpointing=true, train.groups_per_step=32.
    The exit code is 1 if the training does not fit.
    """
    from agentenv.engine.factory import weights_and_engine
    from agentenv.placement import Machine, plan_capacity, read_config
    from agentenv.training.config import GRPOConfig
    from agentenv.training.sections import TRAIN_SECTIONS

    sources = [read_toml(config)] if config else []
    read = read_settings([*sources, parse_pairs(settings or [])], TRAIN_SECTIONS)
    model, _ = weights_and_engine(model)
    plan = plan_capacity(
        read_config(model),
        build(GRPOConfig, read["train"]),
        model=model,
        context=_tokens(context),
        machine=Machine.parse(gpus),
    )
    if as_json:
        print_json(_record(plan))
    else:
        print("\n".join(_lines(plan)))
    if not plan.placement.fits:
        raise typer.Exit(1)


def _tokens(text: str) -> int:
    """Return a number of tokens written as `32768` or `32k`."""
    number, factor = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not number.isdecimal() or not int(number):
        raise UsageError(f"--context {text!r} is no number of tokens", remedy="write it as 32768 or 32k")
    return int(number) * factor


def _record(plan: CapacityPlan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "computed": True,
        "context": plan.context,
        "gpus": str(plan.machine),
        "sizes": asdict(plan.sizes),
        "fits": plan.placement.fits,
        "placement": asdict(plan.placement),
        "alternatives": {change: asdict(one) for change, one in plan.alternatives.items()},
    }


def _lines(plan: CapacityPlan) -> list[str]:
    """Return the plan as text."""
    placement, machine = plan.placement, plan.machine
    how = "LoRA" if plan.config.lora is not None else "all weights"
    usable = f"{machine.usable / _GIGA:.1f} GB each can be used"
    lines = [
        f"{plan.model} · {plan.sizes.parameters / 1e9:.1f} billion parameters · {how} · {plan.config.dtype}",
        f"context {plan.context:,} · {machine.gpus} × {machine.gigabytes} GB, of which {usable}",
        "computed from the config of the model, within 20 %; nothing here was measured on a GPU",
        "",
        _division(placement, plan.config),
        *_table(placement),
        *([f"and {_main_memory(placement)}"] if placement.main_memory else []),
        *([f"and {_asleep(placement)}"] if placement.asleep else []),
        "",
    ]
    if not placement.fits:
        return [*lines, *_remedies(plan)]
    return [*lines, f"fits; the KV cache of each sampler holds {placement.contexts:.1f} full contexts"]


def _division(placement: Placement, config: GRPOConfig) -> str:
    if not placement.servers and config.engine.startswith("vllm:"):
        return "the GPU trains, and a vLLM server samples on it while it does not (engine.sleep=true)"
    if not placement.servers:
        return "the GPU trains, and samples from the same weights while it does not"
    each = "1 GPU" if placement.tensor_parallel == 1 else f"{placement.tensor_parallel} GPUs"
    trainers, shards = placement.trainers, config.fsdp or True
    train = "1 GPU trains" if trainers == 1 else f"{trainers} GPUs train (fsdp={shards})"
    return f"{train}, {_servers(placement.servers)} of {each} sample"


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"


def _table(placement: Placement) -> list[str]:
    """Return the parts that a device of each kind holds, in gigabytes."""
    server = {} if placement.server is None else placement.server.parts
    parts = placement.trainer.parts
    names = [name for name in {**parts, **server} if parts.get(name) or server.get(name)]
    rows = [(name, parts.get(name), server.get(name)) for name in names]
    total = None if placement.server is None else placement.server.total
    rows.append(("together", placement.trainer.total, total))
    return [f"{'GB on each GPU':<16}{'training':>10}{'sampling':>10}"] + [
        f"{name:<16}{_gigabytes(trains):>10}{_gigabytes(samples):>10}" for name, trains, samples in rows
    ]


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / _GIGA:.1f}"


def _remedies(plan: CapacityPlan) -> list[str]:
    placement = plan.placement
    lines = ["does not fit:"]
    if placement.missing > 0:
        lines.append(f"  training needs {placement.missing / _GIGA:.1f} GB more on each GPU")
    if placement.server is None:
        lines.append("  sampling has no room for the weights and the KV cache of one context")
    lines.append("the nearest that fits:" if plan.alternatives else "nothing near fits")
    for change, one in plan.alternatives.items():
        lines.append(f"  {change}" + (f" (with {_main_memory(one)})" if one.main_memory else ""))
    return [
        *lines,
        "without these GPUs:",
        f"  agentenv train ENV -m tinker:{plan.model} -o lora.r=32",
        "    trains adapters on a service or on your own server (docs/training/tinker.md);",
        "  verl, SkyRL, slime and tinker-cookbook can play ENV (docs/training/other-trainers.md)",
    ]


def _main_memory(placement: Placement) -> str:
    together = placement.main_memory * placement.trainers / _GIGA
    return f"{together:.0f} GB of main memory for masters, optimiser and gradients"


def _asleep(placement: Placement) -> str:
    return f"{placement.asleep / _GIGA:.0f} GB of main memory for the weights of the server that sleeps"
