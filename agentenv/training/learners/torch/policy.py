"""The trained model, which computes the log-probabilities of a micro-batch's trained tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentenv.core.context_length import context_length
from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.images import Sees
from agentenv.core.transformers_internals import router_modules
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.pass_sizes import reduces_each_pass
from agentenv.training.learners.torch.adapters import adapted, base_of
from agentenv.training.learners.torch.attention import Node, Way
from agentenv.training.learners.torch.budget import TokenBudget, memory_of
from agentenv.training.learners.torch.check import find_inexact
from agentenv.training.learners.torch.heads import HeadWay, factor_of, is_matrix, own_head, own_logprobs
from agentenv.training.learners.torch.layers import recompute
from agentenv.training.learners.torch.logprob import chunked_logprobs, plain_logprobs
from agentenv.training.learners.torch.memory import keep_freed_memory
from agentenv.training.learners.torch.pack_attention import (
    holds_pairs,
    pack_inputs,
    refuse_lost_soft_cap,
    unpackable,
)
from agentenv.training.learners.torch.packing import CostModel, MicroBatch
from agentenv.training.learners.torch.shards import as_forward
from agentenv.training.learners.torch.world import World
from agentenv.training.options.lora import LoraOptions
from agentenv.training.rows import TokenSupports, to_device

if TYPE_CHECKING:
    from agentenv.training.learners.torch.blank import Unread
    from agentenv.training.learners.torch.routers import Routers

__all__ = ["Policy", "add_lora", "freeze_towers"]


def add_lora(model: Any, options: LoraOptions) -> Any:
    """Return the model with new adapters to train. A model that has adapters is returned unchanged.

    Raises:
        DependencyMissing: peft is not installed.
        UsageError: The model has no layers of these names.
    """
    if adapted(model) is not None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DependencyMissing.of("peft", "train", purpose="LoRA") from None
    targets = options.target_modules
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=_towers(model),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(f"lora: {first_line_of(error)}", remedy="name linear layers of the model") from error


def _towers(model: Any) -> str | None:
    """Return a pattern of the names of modules that see, which get no adapters; None if there are none."""
    names = _tower_names(model)
    return rf"model\.({'|'.join(names)})\..*" if names else None


def _tower_names(base: Any) -> list[str]:
    """Return the names of the parts of a model that see: its towers, and what connects them."""
    if not hasattr(base, "get_image_features"):
        return []
    language = {"language_model", "text_model"}
    return [name for name, _ in base.model.named_children() if name not in language]


def freeze_towers(model: Any) -> None:
    """Switch off the gradients of the parts of a model that see."""
    base = base_of(model)
    for name in _tower_names(base):
        base.model.get_submodule(name).requires_grad_(requires_grad=False)


class Policy:
    """A causal language model from transformers that scores only trained tokens.

    Args:
        model: the model.
        config: the run's options.
        world: the processes that train together, and the device of the training; None means those of the
            launch, and the device of the model.
        vision: what the model sees with; None if it sees nothing.

    Raises:
        UsageError: The model is no causal language model, its attention ignores the cap of its scores, or an
            option needs routers that it does not have.
    """

    def __init__(
        self, model: Any, config: GRPOConfig, *, world: World | None = None, vision: Sees | None = None
    ) -> None:
        self.model = model
        self.vision = vision
        self.world = world or World(next(model.parameters()).device)
        self.device: torch.device = self.world.device
        self.config = config
        self.budget = _budget(config, self.world)
        """Number of tokens of a micro-batch."""
        self.temperature = config.sampling.temperature
        self.base = base_of(model)
        self.decoder: nn.Module = _decoder(self.base)
        self.head: Any = self.base.get_output_embeddings()
        text = self.base.config.get_text_config()
        self.vocab_size: int = self.head.weight.shape[0] if self.head is not None else text.vocab_size
        self.max_length = context_length(
            getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None)
        )
        _prepare(self.device)
        self.routers: Routers | None = None
        """The routers of a mixture of experts; None for other models."""
        if (
            router_modules(self.decoder) is not None
            or config.loss.router_aux_loss_coef
            or config.stream.router_replay
        ):
            # Loaded here, because few models are mixtures of experts.
            from agentenv.training.learners.torch.routers import routers_for

            self.routers = routers_for(self.base, self.decoder, config)
        refuse_lost_soft_cap(text)
        self._text = text
        self.way: Way = "flex" if self.device.type == "cuda" else "tree"
        """How attention over packs is computed."""
        self.pack_reason = unpackable(self.base, text, self.device)
        """Why rows are not packed; empty if they are."""
        layers = _layers(self.model) if config.gradient_checkpointing else []
        recompute(layers)
        self.head_way: HeadWay = "matrix" if is_matrix(self.head) else "own"
        """How logits are computed."""
        self._sharded_pass: Callable[..., tuple[Tensor, Tensor]] | None = None
        """`_score_in_chunks` of a sharded model, between whose begin and end the head's weight is whole."""
        self._blank: Any = None
        """Copy without weights of a sharded model, which itself cannot be copied."""
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._factor = factor_of(text)
        self._cost = _cost(self.decoder, text, self.device)
        _tie_gradients(self.base, sparse=True)
        self._trains_to_save = config.gradient_checkpointing and not layers
        """Whether the model is put into training mode, without which it makes no checkpoints of its own."""
        if self._trains_to_save:
            # The second name is that of transformers before 5.23.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable = next(getattr(self.base, name) for name in names if hasattr(self.base, name))
            enable({"use_reentrant": False})

    def score(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the trained tokens, `[N]`, in the rows' order."""
        index_N = to_device(micro.index_N, self.device)
        labels_N = to_device(micro.labels_N, self.device)
        if micro.images and self.vision is None:
            raise UsageError(
                f"the episodes have images, and {type(self.base).__name__} sees none",
                remedy="train a model that sees, with its own tokenizer beside it",
            )
        # The model stays in evaluation mode: without dropout the trained distribution equals the sampled one.
        if self._trains_to_save:
            self.model.train()
        try:
            score = self._sharded_pass or self._score_in_chunks
            if self.head_way == "whole":
                score = self._score_by_logits
            return score(self._inputs(micro), index_N, labels_N, micro.supports_N)
        finally:
            self.model.eval()

    def replayed(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Return a context in which tokens are sent to the experts that the engine chose, if it told them.

        Args:
            micro: the micro-batch that is scored in the context. Its backward pass belongs there, too.
        """
        if micro.routed_TLK is None or self.routers is None or not self.config.stream.router_replay:
            return nullcontext()
        return self.routers.replayed(micro.routed_TLK, self.device)

    def _score_in_chunks(
        self, inputs: dict[str, Any], index_N: Tensor, labels_N: Tensor, supports_N: TokenSupports | None
    ) -> tuple[Tensor, Tensor]:
        """Score with the LM head on the trained positions only, one chunk at a time."""
        outputs = self.decoder(**inputs)
        hidden_NH = outputs.last_hidden_state.flatten(0, 1).index_select(0, index_N)
        if self.head_way == "own":
            return own_logprobs(
                own_head(self.base, self.decoder, inputs, outputs),
                hidden_NH,
                labels_N,
                temperature=self.temperature,
                supports=supports_N,
                banned=self._banned,
            )
        return chunked_logprobs(
            hidden_NH,
            self.head.weight,
            labels_N,
            # A head that multiplies its logits divides the temperature.
            temperature=self.temperature / self._factor,
            softcap=self.softcap,
            bias_V=self.head.bias,
            supports=supports_N,
            banned=self._banned,
        )

    def _score_by_logits(
        self, inputs: dict[str, Any], index_N: Tensor, labels_N: Tensor, supports_N: TokenSupports | None
    ) -> tuple[Tensor, Tensor]:
        """Score through the model's own logits at all positions: the truth for the other ways."""
        logits_BTV = self.base(**inputs).logits
        logits_NV = logits_BTV.flatten(0, 1).index_select(0, index_N)
        return plain_logprobs(
            logits_NV, labels_N, temperature=self.temperature, supports=supports_N, banned=self._banned
        )

    @property
    def _banned(self) -> Sequence[int]:
        """Ids that stand for parts of images, which no engine samples."""
        return () if self.vision is None else self.vision.banned_ids

    @property
    def packable(self) -> bool:
        """Whether rows can be packed."""
        return not self.pack_reason

    @property
    def cost(self) -> CostModel:
        """Cost of a forward pass, by which micro-batches are laid out."""
        return replace(self._cost, way=self.way)

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": to_device(micro.ids_BT, self.device), "use_cache": False}
        if micro.positions_BT is not None:
            inputs["position_ids"] = to_device(micro.positions_BT, self.device)
        nodes, (count, size) = micro.tree, micro.ids_BT.shape
        if self.vision is not None:
            images = micro.images or ((),) * count
            given, frozen = inputs.get("position_ids"), not self.config.train_vision
            inputs |= self.vision.inputs(self.base, inputs["input_ids"], images, given, frozen=frozen)
        if nodes is None and count == 1 and self.packable and self.way == "flex" and holds_pairs(self._text):
            nodes = (Node(0, size, size),)
        if nodes is None:
            return inputs
        depth_T = torch.arange(size) if micro.positions_BT is None else micro.positions_BT[0]
        return inputs | pack_inputs(self.base, self._text, self.way, nodes, depth_T, self.device)

    def check(self) -> list[str]:
        """Compare scoring and packing with the model's own logits on a padded batch; see `find_inexact`."""
        return find_inexact(self)

    @property
    def to_be_sharded(self) -> bool:
        """Whether `shard` shards the model, because `fsdp` is set and there are several ranks."""
        return self.config.shard_size(self.world.size) > 1

    def shard(self, unread: Unread | None = None) -> None:
        """Shard the model over the ranks, if it is to be sharded, and read the weights that it has not yet.

        The embeddings and the LM head are gathered once for each pass, not once for each chunk of the head.
        """
        if not self.to_be_sharded:
            return
        if self.vision is not None:
            raise UsageError(
                "models that see are not sharded yet", remedy="set fsdp to false, or train with LoRA"
            )
        # Here, because a model that is not sharded needs none of it.
        from agentenv.training.learners.torch.blank import blank_copy

        self._blank = blank_copy(self.model)
        sources = {} if unread is None else unread.release(self.model)
        self._shard()
        if unread is not None:
            unread.fill(self.model, sources)

    def _shard(self) -> None:
        _tie_gradients(self.base, sparse=False)
        self.world.shard(self.base, size=self.config.shard_size(self.world.size))
        self._sharded_pass = as_forward(self.base, self._score_in_chunks)

    def copy(self, dtype: torch.dtype | None = None) -> Policy:
        """Return a policy with a copy of the weights, in another number format if one is named.

        The copy of a sharded model is sharded in the same way, and each rank copies its own parts.
        """
        from agentenv.training.learners.torch.blank import blank_copy, make_real

        model = copy.deepcopy(self.model) if self._blank is None else blank_copy(self._blank)
        copied = model if dtype is None else model.to(dtype)
        twin = Policy(copied, self.config, world=self.world, vision=self.vision)
        # The results of a check are valid for a copy, too.
        twin.head_way, twin.way, twin.pack_reason = self.head_way, self.way, self.pack_reason
        if self._blank is not None:
            twin._shard()
            make_real(twin.model, self.device)
            with torch.no_grad():
                for theirs, ours in zip(twin.model.parameters(), self.model.parameters(), strict=True):
                    theirs.copy_(ours)
        return twin

    @property
    def reduces_each_pass(self) -> bool:
        """Whether the gradients of a sharded model are added over the ranks after each micro-batch.

        Added once, after the last one, they need less traffic, and until then 4 bytes on each device for each
        trained parameter. So they are on the CPU, and where that is at most a quarter of the GPU's memory.
        """
        if self.device.type != "cuda":
            return False
        trained = sum(one.numel() for one in self.model.parameters() if one.requires_grad)
        return reduces_each_pass(trained, torch.cuda.get_device_properties(self.device).total_memory)


def _budget(config: GRPOConfig, world: World) -> TokenBudget:
    repeats = config.shard_size(world.size) == 1
    memory = memory_of(world.device) if repeats else None
    return TokenBudget(config.tokens_per_micro_batch, memory, world.gather)


def _prepare(device: torch.device) -> None:
    """Set in this process what passes on a device are fast with."""
    if device.type == "cpu":
        keep_freed_memory()
    # cuDNN's attention, which torch 2.11 prefers on Hopper, makes plans for each new length of a row. On the
    # CPU this changes nothing.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def _layers(model: nn.Module) -> list[Any]:
    """Return the repeated layers, whose activations can be recomputed in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _decoder(base: Any) -> nn.Module:
    """Return the part of a causal language model below its LM head."""
    sees = hasattr(base, "get_image_features")  # the decoder that it names sees nothing
    decoder = base.get_decoder() if hasattr(base, "get_decoder") and not sees else None
    if decoder is None or decoder is base:
        decoder = getattr(base, base.base_model_prefix, None)
    if decoder is None:  # Llama 4 names an attribute that only its multimodal wrapper has
        decoder = getattr(base, "model", None)
    if not isinstance(decoder, nn.Module):
        raise UsageError(f"{type(base).__name__} is not a causal language model with an LM head")
    return decoder


def _tie_gradients(base: Any, *, sparse: bool) -> None:
    """Make embeddings that are tied to the LM head compute sparse gradients, or dense ones again.

    A dense gradient of the embeddings would fill a second matrix of the whole vocabulary with zeros.
    """
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if isinstance(embeddings, nn.Embedding) and head is not None and head.weight is embeddings.weight:
        embeddings.sparse = sparse


def _cost(decoder: nn.Module, text: Any, device: torch.device) -> CostModel:
    embeddings = decoder.get_input_embeddings() if hasattr(decoder, "get_input_embeddings") else None  # pyright: ignore[reportCallIssue]
    held = embeddings.weight.numel() if embeddings is not None else 0
    body = max(1, sum(parameter.numel() for parameter in decoder.parameters()) - held)
    per_pair = 2.0 * text.hidden_size * text.num_hidden_layers / body
    layers = text.num_hidden_layers
    # Measured on one core: 90 GFLOP/s, and in each layer 10 us more per token and 0.3 ms more per branch.
    branch = 3e-4 * layers / (6 * body / 9e10 + 1e-5 * layers)
    overhead = 2048.0 if device.type == "cuda" else 32.0
    return CostModel(attention=per_pair, overhead=overhead, branch=branch)
