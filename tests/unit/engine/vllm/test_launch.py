"""Starting a vLLM server: the flags that training needs, and what is said where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from agentenv.core import DependencyMissing, EngineError, ModelNotFound, UsageError
from agentenv.engine.vllm import ServeOptions, running_server
from agentenv.engine.vllm.build import Build, find_build
from agentenv.engine.vllm.launch import Output, server_command, stop, wait_healthy
from agentenv.engine.vllm.probe import Asker
from helpers.waiting import wait_until

NOBODY = Asker("http://127.0.0.1:9", None, 1)
GPU = Build(cpu=False, free=0.99)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def test_the_command_has_what_training_needs(model):
    options = ServeOptions(port=81, max_model_len=99, extra=["--seed", "3"])
    command, environment = server_command(model, options, GPU)
    words = " ".join(command)

    for flag in (
        f"--model {model}",
        "--port 81",
        "--logprobs-mode processed_logprobs",
        "--max-logprobs 5120",
        "--generation-config vllm",
        "--enable-prefix-caching",
        "--enable-scale-out",
        "--max-model-len 99",
        "--enable-lora",
    ):
        assert flag in words
    assert words.endswith("--seed 3")
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        assert environment[name] == "1"
    assert "--no-enable-chunked-prefill" not in words
    assert "--no-enable-chunked-prefill" in server_command(model, options, Build(cpu=True, free=None))[0]


def test_a_server_of_a_model_that_sees_prepares_pixels_as_its_processor_does(model, tmp_path):
    flag = "--no-mm-device-do-normalize"
    assert flag not in server_command(model, ServeOptions(), GPU)[0]
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert flag in server_command(model, ServeOptions(), GPU)[0]


def test_what_is_not_wanted_is_left_out(model):
    command, environment = server_command(model, ServeOptions(lora=False, dev_mode=False), GPU)

    assert "--enable-lora" not in command
    assert not {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"} & environment.keys()


def test_a_wrong_model_is_said_before_anything_starts(tmp_path):
    with (
        pytest.raises(ModelNotFound, match="no model at"),
        running_server("/no/such/model", ServeOptions(), log=tmp_path / "log"),
    ):
        pass
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("build", "alone", "share"),
    [
        (Build(cpu=True, free=0.9), True, 0.45),
        (Build(cpu=False, free=0.5), True, 0.47),
        (Build(cpu=False, free=0.5), False, 0.25),
        (Build(cpu=False, free=0.99), True, None),
        (Build(cpu=False, free=0.01), True, None),
        (Build(cpu=True, free=None), True, None),
    ],
    ids=["cpu", "gpu", "beside", "free", "full", "unknown"],
)
def test_vllm_takes_a_share_of_the_memory_that_is_free(build, alone, share):
    assert build.fitting_share(alone=alone) == share


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ({}, "--gpu-memory-utilization", "0.45"),
        ({"memory_share": 0.3}, "--gpu-memory-utilization", "0.3"),
        ({"extra": ["--gpu-memory-utilization", "0.6"]}, "--gpu-memory-utilization", "0.6"),
        ({"extra": ["--kv_cache_memory_bytes=99"]}, "--gpu-memory-utilization", None),
        *[
            ({"max_lora_rank": largest}, "--max-lora-rank", taken)
            for largest, taken in ((8, "8"), (24, "32"), (65, "128"), (512, "512"))
        ],
    ],
)
def test_the_users_own_choice_of_memory_holds_and_a_rank_is_the_next_that_vllm_has(
    model, monkeypatch, given, flag, value
):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    command, _ = server_command(model, ServeOptions(**given), Build(cpu=True, free=0.9))

    assert dict(pairwise(command)).get(flag) == value


@pytest.mark.parametrize(
    ("shown", "devices", "seen"),
    [(None, (1, 2), "1,2"), ("4, 6,7", (0, 2), "4,7"), ("GPU-aa,MIG-bb", (1,), "MIG-bb")],
    ids=["all", "numbers", "names"],
)
def test_devices_are_numbered_among_those_that_the_caller_shows(model, monkeypatch, shown, devices, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    _, environment = server_command(model, ServeOptions(devices=devices), GPU)

    assert environment["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_lora_rank": 513}, "up to 512, not 513"), ({"devices": (1, 2)}, "shows 2 of the 3 GPUs")],
)
def test_what_vllm_or_the_caller_does_not_have_is_refused(model, monkeypatch, options, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")

    with pytest.raises(UsageError, match=said):
        server_command(model, ServeOptions(**options), GPU)


TORCH = """
import os
class cuda:
    FREE = (9, 90, 50)
    shown = [int(one) for one in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")]
    device_count = lambda: len(cuda.shown)
    mem_get_info = lambda device: (cuda.FREE[cuda.shown[device]], 100)
"""


@pytest.mark.parametrize(
    ("given", "shown", "free"),
    [
        ({}, None, 0.09),
        ({}, "1,0", 0.9),
        ({"devices": (1,)}, None, 0.9),
        ({"devices": (0, 1)}, "2,1", 0.5),
        ({"extra": ["--tensor-parallel-size", "2"]}, "1,2,0", 0.5),
        ({"extra": ["-tp=3"]}, "1,2,0", 0.09),
    ],
)
def test_the_memory_of_a_server_is_that_of_its_own_devices(tmp_path, monkeypatch, given, shown, free):
    """Of three devices the first one is busy."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "vllm.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ServeOptions(**given)

    assert find_build(sys.executable, options.gpus, options.environment) == Build(cpu=False, free=free)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this interpreter has vLLM")
def test_an_interpreter_without_vllm_is_said():
    with pytest.raises(DependencyMissing, match=r"vllm \(not in .*python"):
        find_build(sys.executable)


def test_a_server_that_ends_is_said_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n" * 20 + "out of memory\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()

    with pytest.raises(EngineError, match=r"exit code 3:(.|\n)*out of memory"):
        wait_healthy(process, NOBODY, Output(log), 5)


LOG = """
(APIServer pid=1) WARNING 11-22 10:56:45 [system_utils.py:255] This can cause `OSError: [Errno 24] Too many`.
(EngineCore pid=2) ERROR 11-22 10:57:01 [core.py:1203] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-22 10:57:01 [core.py:1203] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-22 10:57:01 [core.py:1203]     raise ValueError(
(EngineCore pid=2) ERROR 11-22 10:57:01 [core.py:1203] ValueError: Available memory (9/23 GiB) is too little.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (LOG, "ValueError: Available memory (9/23 GiB) is too little."),
        (
            "usage: ...\napi_server.py: error: argument --port: expected one argument\n",
            "api_server.py: error:",
        ),
        ("(Worker pid=3) torch.OutOfMemoryError: CUDA out of memory.\n", "torch.OutOfMemoryError: CUDA out"),
    ],
    ids=["engine", "argument", "memory"],
)
def test_the_first_error_of_the_last_start_is_said(tmp_path, log, cause):
    file = tmp_path / "log"
    earlier = "KeyError: of an earlier server\n"
    file.write_text(earlier + log)

    error = Output(file, len(earlier)).error("the server ended")

    assert error.message.startswith(f"the server ended: {cause}")
    assert "\n" not in error.message
    assert str(file) in error.remedy


def test_a_server_that_never_answers_is_given_up(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    with pytest.raises(EngineError, match=r"not healthy after 0\.1 s"):
        wait_healthy(process, NOBODY, Output(tmp_path / "log"), 0.1)
    stop(process)
    process.stdin.close()


def test_workers_that_outlive_their_server_are_ended_too():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    worker = int(process.stdout.readline())
    os.kill(worker, 0)

    stop(process, worker_grace_s=0.1)

    state = Path(f"/proc/{worker}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")
    process.stdin.close()
    process.stdout.close()
