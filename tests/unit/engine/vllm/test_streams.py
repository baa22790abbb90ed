"""Weights that a trainer sends to servers, over real process groups on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from agentenv.core import EngineError, UsageError  # noqa: E402
from agentenv.engine import push_weights  # noqa: E402
from agentenv.engine.vllm import connect, streams, wire  # noqa: E402
from helpers.fake_vllm import connected, say, serving  # noqa: E402
from helpers.receiving import Receiving  # noqa: E402
from helpers.waiting import until  # noqa: E402

TENSORS = {
    "a": torch.arange(7, dtype=torch.bfloat16),
    "b": torch.randn(3, 5),
    "c": torch.tensor(4, dtype=torch.int64),
    "d": torch.randn(2, 3, dtype=torch.float16),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A directory of weights in two files, which are sent in several parts."""
    monkeypatch.setattr(wire, "PART_BYTES", 48)
    save_file({name: TENSORS[name] for name in "ab"}, tmp_path / "model-1.safetensors")
    save_file({name: TENSORS[name] for name in ("c", "d", "empty")}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@asynccontextmanager
async def sending(*fakes, **options):
    """Serve the fakes; yield an engine that sends weights to them."""
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.stop)
        options = {"retry_s": 5, "hang_s": 20, "transfer": "gloo"} | options
        yield await stack.enter_async_context(connected(*(fake.url for fake in fakes), **options))


def same(fake):
    return fake.got.keys() == TENSORS.keys() and all(
        fake.got[name].dtype == tensor.dtype and torch.equal(fake.got[name], tensor)
        for name, tensor in TENSORS.items()
    )


async def test_all_servers_get_the_weights_and_their_version(weights):
    fakes = [Receiving(), Receiving()]
    async with sending(*fakes) as engine:
        assert await engine.load_weights(weights, version=3) == 3
        assert await engine.load_weights(weights, version=4) == 4

        for fake in fakes:
            assert same(fake)
            assert fake.finished == ["agentenv-3", "agentenv-4"]
            assert fake.posts.count("init") == 1
            assert fake.posts.count("update") > 2
            order = [
                name for name in fake.posts if name in {"/pause?mode=keep", "start", "finish", "/resume"}
            ]
            assert order == ["/pause?mode=keep", "start", "finish", "/resume"] * 2
        assert (await say(engine)).version_ranges[0][0] == 4


async def test_servers_that_are_sent_a_part_at_the_same_time_share_it(weights, monkeypatch):
    read, plain, all_asked = [], wire.read_part, asyncio.Barrier(3)

    class Together(Receiving):
        async def update_weights(self, request):
            await all_asked.wait()
            return await super().update_weights(request)

    def noted(part, **options):
        read.append(list(part))
        return plain(part, **options)

    monkeypatch.setattr(wire, "read_part", noted)
    fakes = [Together(), Together(), Together()]
    async with sending(*fakes) as engine:
        await engine.load_weights(weights, version=1)

        assert all(map(same, fakes))
        assert read == list(map(list, wire.parts_of(weights)))
        assert not engine._weights._streams._reading


@pytest.mark.parametrize("command", ["update", "finish"])
async def test_a_server_that_breaks_off_gets_the_weights_over_a_new_channel(weights, command):
    steady, broken = Receiving(), Receiving(dies_at=command)
    async with sending(steady, broken) as engine:
        assert await engine.load_weights(weights, version=3) == 3
        assert same(steady)
        await until(lambda: broken.version == "agentenv-3" and not broken.is_open)

        assert same(broken)
        assert broken.posts.count("init") == 2


async def test_an_update_that_another_process_left_open_is_finished_first(weights):
    fake = Receiving(is_open=True)
    async with sending(fake) as engine:
        await engine.load_weights(weights, version=1)

        assert fake.finished == [None, "agentenv-1"]
        assert same(fake)


@pytest.mark.parametrize("refuses", ["init", "start", "update"])
async def test_a_server_that_cannot_receive_says_what_to_start_it_with(weights, refuses):
    async with sending(Receiving(refuses=refuses), hang_s=3) as engine:
        with pytest.raises(EngineError, match="agentenv serve --transfer"):
            await engine.load_weights(weights, version=1)

        assert engine.weights_version == 0


async def test_servers_that_end_with_different_weights_fail_the_update(weights):
    async with sending(Receiving(), Receiving(alters=True)) as engine:
        with pytest.raises(EngineError, match="their checksums differ"):
            await engine.load_weights(weights, version=1)


@pytest.fixture
def channel(weights):
    """One end of a channel, and a part of the weights."""
    meeting = wire.Rendezvous(host="127.0.0.1", port=0, size=1, transport="gloo", timeout_s=5)
    return wire.Channel(meeting, 0), wire.read_part(next(wire.parts_of(weights)))


def test_a_part_that_is_not_what_was_sent_is_found_once_before_the_weights_are_used(channel, monkeypatch):
    channel, part = channel
    for broadcast, told in (
        (lambda content: content.copy_(part.content), nullcontext()),
        (lambda content: content.fill_(1), pytest.raises(ValueError, match="checksum")),
    ):
        monkeypatch.setattr(channel, "_broadcast", broadcast)
        list(channel.receive(part.description(), "cpu"))
        with told:
            channel.verify()
    channel.verify()


def test_receiving_a_part_reads_nothing_from_the_device(channel, monkeypatch):
    channel, part = channel
    monkeypatch.setattr(channel, "_broadcast", lambda _: None)

    received = dict(channel.receive(part.description(), "meta"))  # whose tensors cannot be read

    assert list(received) == part.names
    assert all(tensor.is_meta for tensor in received.values())


@pytest.fixture
def ended_process():
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


async def test_weights_are_staged_in_memory_and_deleted_with_the_engine(tmp_path, monkeypatch, ended_process):
    monkeypatch.setattr(streams, "MEMORY", tmp_path)
    left = tmp_path / f"agentenv-weights-{ended_process}-x"
    left.mkdir()
    other = tmp_path / f"agentenv-weights-{os.getppid()}-x"
    other.mkdir()

    fake = Receiving()
    async with sending(fake) as engine:
        model = Saved()
        assert await push_weights(engine, model, version=2, directory=tmp_path / "shared") == 2
        assert [path.parent.parent for path in model.saved] == [tmp_path]
        assert engine.weights_directory.stat().st_mode & 0o077 == 0
        assert same(fake)

    assert list(tmp_path.iterdir()) == [other]


async def test_weights_that_memory_has_no_room_for_wait_in_the_directory_of_the_run(tmp_path, monkeypatch):
    """Docker gives files in memory 64 MB."""
    (memory := tmp_path / "memory").mkdir()
    monkeypatch.setattr(streams, "MEMORY", memory)
    size, free = sum(value.nbytes for value in TENSORS.values()), 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    fake = Receiving()
    async with sending(fake) as engine:
        model = Saved()
        for version, free in enumerate((2 * size, size, 2 * size, size), 1):  # noqa: B007 - read by disk_usage
            await push_weights(engine, model, version=version, directory=tmp_path / "run")
            assert same(fake)

        places = [path.relative_to(tmp_path).parts[0] for path in model.saved]
        kept = sorted(path.name for path in model.saved if path.exists())

    assert places == ["memory", "run", "memory", "run"]
    assert kept == ["weights-3", "weights-4"], "the two newest, wherever they are"


class Saved:
    def __init__(self):
        self.saved = []

    def state_dict(self):
        return TENSORS

    def save_pretrained(self, target):
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")
        save_file(TENSORS, target / "model.safetensors")
        self.saved.append(target)


async def test_a_transport_that_is_not_there_is_refused():
    async with serving() as fake:
        for transfer, told in (("pigeon", '"disk", "gloo" or "nccl"'), ("nccl", "no nccl")):
            if transfer == "nccl" and torch.distributed.is_nccl_available():
                continue
            with pytest.raises(UsageError, match=told):
                await asyncio.to_thread(connect, fake.url, tokenizer="x", transfer=transfer)
