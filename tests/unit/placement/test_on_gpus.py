"""A training on the GPUs of one machine: who gets which device, and what is started there."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from agentenv.core import UsageError
from agentenv.engine.vllm.build import Build
from agentenv.engine.vllm.launch import ServeOptions, server_command
from agentenv.placement import Machine, on_gpus
from agentenv.placement.on_gpus import Division, divide, machine_of, run_divided, trainer_command
from agentenv.runs import Run
from agentenv.training import GRPOConfig, LoraOptions
from helpers.model_server import model_server
from helpers.waiting import wait_until
from scenes import saved_model

TWO = Division((0, 1), ((2,),), 512)


def tiny_config(path: Path, **options) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaConfig(vocab_size=300, max_position_embeddings=512, **{**sizes, **options}).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _all_devices(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_divided_as_the_plan_says(tmp_path):
    train = GRPOConfig(tokens_per_micro_batch=64)
    division = divide(tiny_config(tmp_path), train, Machine(4, 80), 128)

    used = [*division.trainers, *(one for server in division.servers for one in server)]
    assert used == [0, 1, 2, 3]
    assert division.trainers
    assert division.servers
    assert division.context == 128


def options_of(path: Path, monkeypatch, **train) -> list[ServeOptions]:
    """Return with what the servers of a training are started."""
    servers = Started()
    division = divide(tiny_config(path), GRPOConfig(tokens_per_micro_batch=64, **train), Machine(4, 80), 128)
    instead(monkeypatch, "pass")
    run_divided(division, "model", [], path / "logs", serve=servers)
    assert servers.options
    return servers.options


def test_servers_tell_the_experts_that_the_training_replays(tmp_path, monkeypatch):
    options = options_of(tmp_path, monkeypatch, router_replay=True)

    assert all("--enable-return-routed-experts" in one.extra for one in options)


@pytest.mark.parametrize(("rank", "flags"), [(100, ["--max-lora-rank", "128"]), (None, [])])
def test_servers_take_adapters_of_the_trainings_rank_and_none_without_it(rank, flags, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    options, *_ = options_of(tmp_path, monkeypatch, lora=None if rank is None else LoraOptions(r=rank))
    command, environment = server_command(str(tmp_path), options, Build(cpu=False, free=0.99))

    assert ("--enable-lora" in command) == ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment) == bool(flags)
    assert flags == [] or command[command.index(flags[0]) :][:2] == flags


def test_a_single_gpu_does_both(tmp_path):
    division = divide(tiny_config(tmp_path), GRPOConfig(tokens_per_micro_batch=64), Machine(1, 80))

    assert (division.trainers, division.servers) == ((0,), ())
    assert division.context == 512, "no longer than the model takes"


def test_what_does_not_fit_is_refused_with_what_does(tmp_path):
    large = {"hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64}
    with pytest.raises(UsageError, match="does not fit on 2x8") as refused:
        divide(tiny_config(tmp_path, **large), GRPOConfig(tokens_per_micro_batch=64), Machine(2, 8), 128)
    assert "the nearest that fits" in str(refused.value)


def test_machines_are_written_with_and_without_their_memory(monkeypatch):
    assert machine_of("8x80") == Machine(8, 80)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    sizes = {0: 85e9, 1: 80.5e9, 2: 85e9, 3: 24e9}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda one: type("Device", (), {"total_memory": int(sizes[one])}),
    )
    assert machine_of("2") == Machine(2, 80), "the smallest of those that are used counts"
    with pytest.raises(UsageError, match="this machine has 4 GPUs"):
        machine_of("8")


def test_torchrun_starts_the_trainers_with_their_devices_and_the_servers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(on_gpus, "usable_cores", lambda: 12)
    urls = ["http://127.0.0.1:81/v1", "http://127.0.0.1:82/v1"]
    command, environment = trainer_command(TWO, ["env.py", "--steps=3"], urls)

    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    at = command.index("agentenv")
    assert command[at - 1 : at + 4] == ["-m", "agentenv", "train", "env.py", "--steps=3"]
    assert f"train.engine={','.join(urls)}" in command
    assert "train.fsdp=true" in command
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "6", "PYTHONSAFEPATH": "1"}


def test_trainers_share_as_many_copies_as_the_setting_says(tmp_path):
    division = divide(
        tiny_config(tmp_path), GRPOConfig(fsdp=2, tokens_per_micro_batch=64), Machine(4, 8), 128
    )
    command, _ = trainer_command(division, ["env.py"], ["http://h/v1"])

    assert len(division.trainers) == 2, "3 trainers cannot be divided"
    assert "train.fsdp=2" in command


def test_a_single_trainer_is_no_launch():
    command, environment = trainer_command(Division((0,), ((1,),), 512), [], ["http://h/v1"])

    assert command[:4] == [sys.executable, "-m", "agentenv", "train"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert "train.fsdp=true" not in command


def test_trainers_have_gpus_among_those_that_the_caller_shows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    _, environment = trainer_command(TWO, [], ["http://h/v1"])

    assert environment["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_a_server_sees_its_devices_only(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    build = Build(cpu=False, free=0.99)
    _, environment = server_command(str(tmp_path), ServeOptions(devices=(6, 7)), build)
    _, others = server_command(str(tmp_path), ServeOptions(), build)

    assert environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "CUDA_VISIBLE_DEVICES" not in others


class Started:
    """Servers that only tell how they were started and ended."""

    def __init__(self) -> None:
        self.options: list[ServeOptions] = []
        self.logs: list[str] = []
        self.ended = 0

    @contextmanager
    def __call__(self, model: str, options: ServeOptions, log: Path):
        self.options.append(options)
        self.logs.append(log.name)
        yield f"http://127.0.0.1:{options.port}/v1"
        self.ended += 1


def instead(monkeypatch, code: str) -> None:
    """Run a program in the place of the trainers."""
    monkeypatch.setattr(
        "agentenv.placement.on_gpus.trainer_command",
        lambda *_: ([sys.executable, "-c", code], {"SHOWN": "1"}),
    )


def test_servers_are_started_on_their_devices_and_end_with_the_training(tmp_path, monkeypatch):
    servers = Started()
    instead(monkeypatch, "import os; assert os.environ['SHOWN'] == '1'")
    code = run_divided(
        Division((0,), ((1, 2), (3, 4)), 640, options=ServeOptions(max_model_len=640)),
        "model",
        [],
        tmp_path / "logs",
        serve=servers,
    )

    assert code == 0
    assert servers.ended == 2
    assert sorted(servers.logs) == ["vllm-0.log", "vllm-1.log"]
    assert {one.devices for one in servers.options} == {(1, 2), (3, 4)}
    assert len({one.port for one in servers.options}) == 2
    assert all(one.max_model_len == 640 for one in servers.options)
    assert all(list(one.extra) == ["--tensor-parallel-size", "2"] for one in servers.options)


def test_the_exit_code_is_that_of_the_training(tmp_path, monkeypatch):
    servers = Started()
    instead(monkeypatch, "import sys; sys.exit(9)")

    assert run_divided(TWO, "model", [], tmp_path, serve=servers) == 9
    assert servers.ended == 1


@pytest.mark.parametrize("heard", [signal.default_int_handler, signal.SIG_IGN], ids=["shell", "background"])
def test_sigterm_reaches_the_training_which_may_write_a_checkpoint(heard, tmp_path, monkeypatch):
    ready, written = tmp_path / "ready", tmp_path / "checkpoint"
    waits = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(written)!r}).touch()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "while True:\n"
        "    time.sleep(0.05)\n"  # a signal just before a long sleep would not end it
    )
    instead(monkeypatch, waits)

    def end() -> None:
        wait_until(ready.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGINT, heard)
    thread = threading.Thread(target=end)
    thread.start()
    try:
        assert run_divided(Division((0,), ((1,),), 512), "model", [], tmp_path, serve=Started()) == 130
        assert written.exists()
        assert signal.getsignal(signal.SIGINT) is heard
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()


@pytest.mark.slow
def test_two_processes_and_a_server_train_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved_model(tmp_path / "tiny")
    Path("lengths.py").write_text(
        "import agentenv as ae\n"
        "class Lengths(ae.ToolEnv):\n"
        "    def start(self, n: int) -> str:\n"
        "        return f'say {n}'\n"
        "    def reward(self, answer: str) -> float:\n"
        "        return len(answer) / 10\n"
        "ae.register('demo/Lengths-v0', Lengths, tasks=[{'n': n} for n in range(9)])\n"
    )
    words = ["lengths.py", "-m", "tiny", "--steps", "2", "-k", "4", "--demos", "none"]
    words += ["-o", "groups_per_step=2", "-o", "limits.max_turns=1", "-o", "limits.max_tokens_per_turn=8"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    with model_server(str(tmp_path / "tiny")) as server:

        @contextmanager
        def serve(model: str, options: ServeOptions, log: Path):
            yield f"{server.url}/v1"

        assert run_divided(TWO, "tiny", words, tmp_path / "logs", serve=serve) == 0

    (path,) = (one for one in (tmp_path / "runs").iterdir() if one.name != "servers" and one.is_dir())
    run = Run(path)
    assert run.info.status.value == "finished"
    assert len(list(run)) == 16
    assert [step["weights_version"] for step in run.metrics()] == [1, 2]
    assert server.version.endswith("2"), "the server has the last weights"
    assert run.info.config["train"]["fsdp"] is True
    assert run.info.config["train"]["engine"] == f"{server.url}/v1"


def test_the_command_line_is_passed_on(monkeypatch, tmp_path):
    from agentenv.cli import main

    seen = {}

    def record(division, model, words, logs):
        seen.update(division=division, model=model, words=words, logs=logs)
        return 7

    monkeypatch.setattr("agentenv.cli.on_gpus.run_divided", record)
    model = tiny_config(tmp_path / "m")
    given = ["train", "agentenv/Calculator-v0", "-m", model, "--gpus", "4x80", "--steps", "5", "-k", "4"]
    settings = ["-o", "train.tokens_per_micro_batch=64", "-o", "limits.max_context_tokens=256", "--json"]
    settings += ["-o", "engine.start_timeout_s=1800"]
    with pytest.raises(SystemExit) as ended:
        main([*given, *settings])

    assert ended.value.code == 7
    assert seen["division"].context == 256
    assert seen["division"].options.start_timeout_s == 1800
    assert seen["model"] == model
    assert seen["logs"] == Path("runs/servers")
    words = seen["words"]
    assert not any("gpus" in word for word in words)
    assert {"agentenv/Calculator-v0", f"--model={model}", "--steps=5", "--episodes=4", "--json"} <= set(words)
    assert [word for word in words if word.startswith("--set=")] == [
        "--set=train.tokens_per_micro_batch=64",
        "--set=limits.max_context_tokens=256",
        "--set=engine.start_timeout_s=1800",
    ]


@pytest.mark.parametrize(
    ("words", "environment", "reason"),
    [
        (["-m", "http://h:8000/v1"], {}, "starts servers of its own"),
        (["-m", "MODEL", "-o", "engine=vllm:x"], {}, "starts servers of its own"),
        (["-m", "MODEL"], {"WORLD_SIZE": "2"}, "leave torchrun out"),
        ([], {}, "no model to train is named"),
    ],
)
def test_what_contradicts_it_is_refused(words, environment, reason, monkeypatch, tmp_path, capsys):
    from agentenv.cli import main

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = tiny_config(tmp_path / "m")
    words = [model if word == "MODEL" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["train", "agentenv/Calculator-v0", *words, "--gpus", "4x80"])

    assert ended.value.code
    assert reason in capsys.readouterr().err


def test_a_resumed_run_goes_on_with_servers_at_other_addresses():
    from agentenv.training.request import TrainRequest

    assert "engine" not in TrainRequest(train={"workers": 2})._changed_on_resume()
    assert "engine" not in TrainRequest(train=GRPOConfig(model="m"))._changed_on_resume()
    changed = TrainRequest(train={"engine": "http://127.0.0.1:9/v1"})._changed_on_resume()
    assert changed["engine"] == "http://127.0.0.1:9/v1"
