"""A server of the Tinker API in this process: ServiceClient, TrainingClient, SamplingClient, RestClient.

Losses and their reduction are those of https://tinker-docs.thinkingmachines.ai/losses: the sum over the tokens of
all data of all forward_backward calls since the last optim_step; AdamW with `grad_clip_norm`. `Server` changes
this into what other servers do, fails on demand, and keeps saved states in a folder, so that another process
finds them. `log` holds the calls in order.
"""

from __future__ import annotations

import copy
import io
import json
import tarfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from tinker import types
from transformers import AutoModelForCausalLM


def done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


@dataclass
class Server:
    """What the server does, and where it keeps states."""

    root: Path
    model: str
    """Directory of the base model, which is also its name."""
    reduction: str = "sum"
    """`sum`, or `mean_mean`: the mean over a datum's inputs, then over all data (SkyRL's JAX backend)."""
    clips: bool = True
    takes_eps: bool = True
    keeps_samplers: bool = True
    first_logprob: bool = True
    """Whether prompts' log-probabilities begin with None."""
    dtype: torch.dtype = torch.float32
    max_context: int | None = 2048
    fault: Callable[[str, int], str] = lambda call, number: ""
    """Told a call and its number; returns `before` to fail before it does anything, `after` to lose its answer."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    calls: int = 0
    alive: bool = True
    starts: int = 0
    """How often the server was started again, which knows no client that was made before."""

    def ServiceClient(self, **given: Any) -> FakeServiceClient:
        return FakeServiceClient(self)

    def fresh(self, rank: int, seed: int) -> Any:
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=self.dtype)
        return get_peft_model(base, LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear")).eval()

    def read(self, path: str) -> dict[str, Any]:
        """Return a saved state."""
        return torch.load(self.root / path.rpartition("/")[2], weights_only=False)

    def answer(self, call: str, work: Callable[[], Any], start: int | None = None) -> Any:
        """Do a call's work, unless it shall fail.

        Args:
            call: name of the call.
            work: what the call does.
            start: number of starts that its client has seen; None if the call is not one of a client.
        """
        self.calls += 1
        self.log.append((call,))
        fault = self.fault(call, self.calls) if self.alive else "before"
        if start not in {None, self.starts}:
            fault = "before"
        if fault != "before":
            value = work()
        if fault:
            raise ValueError(f"Error retrieving result of {call} (exceeded 3 retries)")
        return value


class FakeServiceClient:
    def __init__(self, server: Server) -> None:
        self.server = server

    def get_server_capabilities(self) -> Any:
        one = types.SupportedModel(model_name=self.server.model, max_context_length=self.server.max_context)
        return SimpleNamespace(supported_models=[one])

    def create_lora_training_client(self, base_model: str, rank: int, seed: int | None = None) -> Any:
        assert base_model == self.server.model
        return self.server.answer(
            "create", lambda: FakeTrainingClient(self.server, self.server.fresh(rank, seed or 0), rank)
        )

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        return self.server.answer("load", lambda: self._loaded(path, optimizer=True))

    def create_training_client_from_state(self, path: str) -> Any:
        return self.server.answer("load", lambda: self._loaded(path, optimizer=False))

    def _loaded(self, path: str, *, optimizer: bool) -> Any:
        state = self.server.read(path)
        client = FakeTrainingClient(self.server, self.server.fresh(state["rank"], 0), state["rank"])
        set_peft_model_state_dict(client.model, state["weights"])
        if optimizer:
            client.optimizer.load_state_dict(state["optimizer"])
        return client

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Any:
        if base_model:
            model = AutoModelForCausalLM.from_pretrained(self.server.model, dtype=self.server.dtype).eval()
        else:
            model = self._loaded(str(model_path), optimizer=False).model
        return FakeSamplingClient(self.server, model)

    def create_rest_client(self) -> Any:
        return FakeRestClient(self.server)

    def close(self, status: str) -> Future:
        return done(None)


class FakeTrainingClient:
    def __init__(self, server: Server, model: Any, rank: int) -> None:
        self.server, self.model, self.rank, self.count = server, model, rank, 0
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0)
        self.poisoned, self.start = False, server.starts

    def _do(self, call: str, work: Callable[[], Any]) -> Future:
        """Fail as the SDK does: with the result, and with every later call of this client."""
        future: Future = Future()
        try:
            if self.poisoned:
                raise RuntimeError("this client failed before")
            future.set_result(self.server.answer(call, work, self.start))
        except Exception as error:  # noqa: BLE001 - the future raises it
            self.poisoned = True
            future.set_exception(error)
        return future

    def _logprobs(self, datum: Any) -> torch.Tensor:
        ids = torch.tensor([datum.model_input.to_ints()])
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
        logits = self.model(ids).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    @staticmethod
    def _loss(name: str, lp: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        value = {key: one.to_torch() for key, one in given.items() if key != "target_tokens"}
        if name == "cross_entropy":
            return -lp * value["weights"]
        assert name == "importance_sampling", name
        return -(lp - value["logprobs"]).exp() * value["advantages"]

    def _pass(self, data: Any, loss_fn: str, *, backward: bool) -> Any:
        outputs = []
        with torch.set_grad_enabled(backward):
            for datum in data:
                lp = self._logprobs(datum)
                each = self._loss(loss_fn, lp, datum.loss_fn_inputs)
                loss = each.mean() if self.server.reduction == "mean_mean" else each.sum()
                if backward:
                    loss.backward()
                    self.count += 1
                outputs.append({"logprobs": types.TensorData.from_torch(lp.detach().float())})
        return SimpleNamespace(loss_fn_outputs=outputs, metrics={})

    def forward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Future:
        return self._do("forward", lambda: self._pass(data, loss_fn, backward=False))

    def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Future:
        return self._do("forward_backward", lambda: self._pass(data, loss_fn, backward=True))

    def optim_step(self, adam: Any) -> Future:
        return self._do("optim_step", lambda: self._step(adam))

    def _step(self, adam: Any) -> Any:
        for p in self.trained if self.server.reduction == "mean_mean" else ():
            if p.grad is not None:
                p.grad /= max(self.count, 1)
        limit = adam.grad_clip_norm if adam.grad_clip_norm and self.server.clips else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.trained, limit)
        eps = adam.eps if self.server.takes_eps else 1e-8
        for group in self.optimizer.param_groups:
            betas = (adam.beta1, adam.beta2)
            group.update(lr=adam.learning_rate, betas=betas, eps=eps, weight_decay=adam.weight_decay)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count = 0
        return SimpleNamespace(metrics={"grad_norm": float(norm)})

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Future:
        return self._do("save_state", lambda: self._saved(name, f"tinker://run/weights/{name}"))

    def save_weights_for_sampler(self, name: str) -> Future:
        # SkyRL's paths of sampler weights have no kind, which the SDK's own parser refuses.
        return self._do("save_weights_for_sampler", lambda: self._saved(name, f"tinker://run/{name}"))

    def _saved(self, name: str, named: str) -> Any:
        path = self.server.root / name
        assert not path.exists(), f"{name} is saved twice"
        weights = {key: value.clone() for key, value in get_peft_model_state_dict(self.model).items()}
        state = {"weights": weights, "optimizer": self.optimizer.state_dict(), "rank": self.rank}
        torch.save(state, path)
        return SimpleNamespace(path=named)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        model = copy.deepcopy(self.model) if self.server.keeps_samplers else self.model
        return self._do("sampling_client", lambda: FakeSamplingClient(self.server, model)).result()


class FakeSamplingClient:
    """Samples from a copy of the weights; log-probabilities are those at temperature 1, as at SkyRL."""

    def __init__(self, server: Server, model: Any) -> None:
        self.server, self.model, self.start = server, model, server.starts

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Future:
        future: Future = Future()
        try:
            work = partial(self._sampled, prompt, sampling_params)
            future.set_result(self.server.answer("sample", work, self.start))
        except Exception as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        return future

    @torch.no_grad()
    def _sampled(self, prompt: Any, asked: Any) -> Any:
        assert asked.seed is None or asked.seed < 2**31, "out of bounds for int32"
        random = torch.Generator().manual_seed(asked.seed or 0)
        ids, logprobs, start = prompt.to_ints(), [], prompt.length
        while len(ids) - start < asked.max_tokens:
            raw = self.model(torch.tensor([ids])).logits[0, -1].float()
            chances = (raw / (asked.temperature or 1)).softmax(-1)
            greedy = not asked.temperature
            token = int(raw.argmax()) if greedy else int(torch.multinomial(chances, 1, generator=random))
            ids.append(token)
            logprobs.append(float(raw.log_softmax(-1)[token]))
            if token in asked.stop:
                break
        reason = "stop" if ids[-1] in asked.stop else "length"
        one = SimpleNamespace(tokens=ids[start:], logprobs=logprobs, stop_reason=reason)
        return SimpleNamespace(sequences=[one], prompt_cache_hit_tokens=0)

    @torch.no_grad()
    def compute_logprobs(self, prompt: Any) -> Future:
        ids = torch.tensor([prompt.to_ints()])
        found = self.model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return done([*([None] if self.server.first_logprob else []), *found.tolist()])


class FakeRestClient:
    def __init__(self, server: Server) -> None:
        self.server = server

    def get_checkpoint_archive_url(self, training_run_id: str, checkpoint_id: str) -> Future:
        state = self.server.read(f"tinker://{training_run_id}/{checkpoint_id}")
        folder = self.server.root / f"archive-{uuid4().hex}"
        folder.mkdir()
        save_file(state["weights"], folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": state["rank"], "lora_alpha": 32, "target_modules": None}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(folder, arcname="checkpoint")
        (folder / "all.tar.gz").write_bytes(packed.getvalue())
        return done(SimpleNamespace(url=(folder / "all.tar.gz").as_uri()))

    def delete_checkpoint_from_tinker_path(self, path: str) -> Future:
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        (self.server.root / path.rpartition("/")[2]).unlink()
        return done(None)
