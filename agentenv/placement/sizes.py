"""The sizes of a model, computed from its `config.json` alone: nothing is loaded, not even torch.

The formulas are those of decoders whose layers attend and then pass a gated MLP, a plain one or experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from agentenv.core.errors import DependencyMissing, ModelNotFound, UsageError
from agentenv.training.options.lora import LoraOptions

__all__ = ["ModelSizes", "model_sizes", "read_config"]

DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}
"""What published configs of Gemma 3 leave to their class; all of Gemma tie the LM head to the embeddings."""
UNGATED = ("gpt_neox", "nemotron", "phi", "starcoder2")
"""Families whose MLP has two matrices instead of three."""
NORMED = ("gemma3", "olmo2", "qwen3")
"""Families that normalise queries and keys."""

Matrices = dict[str, tuple[int, int]]
"""Numbers of inputs and outputs of a layer's matrices, by their names."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of parameters of a causal language model, and of the values that a layer keeps of a token."""

    parameters: int
    tower: int
    """Those that see images, which are trained with `train_vision` only."""
    layer: int
    """Those of the largest layer, which a sharded pass gathers at once."""
    head: int
    layers: int
    vocab_size: int
    hidden_size: int
    cache_values: int
    """Values in the KV cache, of all layers."""
    kept: int
    """Values for the backward pass, as wide as the weights, if these are trained."""
    kept_frozen: int
    """The same if only adapters are trained."""
    kept_wide: int
    """Values beside them in float32: the inputs of norms."""
    inner: int
    """Values between the matrices of the MLP."""
    linears: Matrices
    """The linear modules of a layer, which can have adapters."""

    def trained(self, lora: LoraOptions | None, *, vision: bool = False) -> int:
        """Return the number of trained parameters."""
        if lora is None:
            return self.parameters - (0 if vision else self.tower)
        targets = lora.target_modules
        names = self.linears if isinstance(targets, str) else self.linears.keys() & set(targets)
        return self.layers * lora.r * sum(sum(self.linears[name]) for name in names)


def read_config(model: str) -> Mapping[str, Any]:
    """Return `config.json` of a directory or a Hub id, or what a GGUF file says in its place.

    No weights are read.

    Raises:
        ModelNotFound: There is no such config.
    """
    from agentenv.engine.hf.load import directory_of

    path = Path(directory_of(model, "config.json"))
    if not (path / "config.json").exists() and (path.suffix == ".gguf" or any(path.glob("*.gguf"))):
        return _gguf_config(model)
    remedy = "name the directory or the Hub id of a model, or a .gguf file"
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"the config of {model} cannot be read: {error}", remedy=remedy) from None
    if not isinstance(config, dict):
        raise ModelNotFound(f"the config of {model} cannot be read: it is no object", remedy=remedy)
    return cast("Mapping[str, Any]", config)


def _gguf_config(model: str) -> Mapping[str, Any]:
    DependencyMissing.require("transformers", "gguf", extra="train", purpose="reading a .gguf file")
    files = import_module("agentenv.engine.hf.load").locate(model)
    read = import_module("transformers").AutoConfig.from_pretrained
    return read(files.path, gguf_file=files.gguf_file).to_dict()


def model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of a model from its config.

    Raises:
        UsageError: A number that every decoder has is missing.
    """
    family = str(config.get("model_type", ""))
    written = {name: one for name, one in (config.get("text_config") or config).items() if one is not None}
    gemma = {"tie_word_embeddings": family.startswith("gemma"), **(DEFAULTS if family == "gemma3" else {})}
    try:
        return _sizes(
            {"tie_word_embeddings": config.get("tie_word_embeddings"), **gemma, **written}, config, family
        )
    except (LookupError, TypeError, ArithmeticError, AttributeError, ValueError) as error:
        raise UsageError(
            f"the config of {family or 'a nameless model'} cannot be planned: {error!r}",
            remedy="plan with the config of a causal language model that has all its sizes written out",
        ) from None


def _sizes(text: Mapping[str, Any], config: Mapping[str, Any], family: str) -> ModelSizes:
    hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    size = text.get("head_dim") or hidden // heads
    queries, keys = heads * size, (text.get("num_key_value_heads") or heads) * size
    cached = 2 * keys
    attention = {
        "q_proj": (hidden, queries * (2 if text.get("attn_output_gate") else 1)),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }
    if "kv_lora_rank" in text:
        attention, cached = _latent(text, hidden, heads), text["kv_lora_rank"] + text["qk_rope_head_dim"]
    recurrent = list(text.get("layer_types", ())).count("linear_attention")
    mixing = (layers - recurrent) * _count(attention) + (recurrent and recurrent * _recurrent(text, hidden))
    mlp = _mlp(text, hidden, layers, gated=family not in UNGATED)
    head, tower = text["vocab_size"] * hidden, _tower(config.get("vision_config") or {}, hidden)
    norms = (4 if family.startswith(("gemma2", "gemma3")) else 2) * hidden
    normed = queries + keys if family.startswith(NORMED) else 0
    # Queries, keys, values and what is attended to; the gate twice, and what it opens.
    frozen = 2 * (queries + keys) + 3 * mlp.inner
    return ModelSizes(
        parameters=tower + head * (1 if text["tie_word_embeddings"] else 2) + mixing + mlp.parameters,
        tower=tower,
        layer=_count(attention) + mlp.largest,
        head=head,
        layers=layers,
        vocab_size=text["vocab_size"],
        hidden_size=hidden,
        cache_values=(layers - recurrent) * cached,
        # Results of norms before and after their weights, the MLP's product, what experts get and return.
        kept=frozen + 2 * norms + normed + mlp.inner + mlp.routed,
        kept_frozen=frozen,
        kept_wide=norms + normed,
        inner=mlp.inner,
        linears={**attention, **mlp.linears},
    )


@dataclass(frozen=True, slots=True)
class _MLP:
    """The part of all layers that follows attention, dense or of experts."""

    parameters: int
    largest: int
    """Number of parameters in the largest layer."""
    inner: int
    routed: int
    """Values of a token that its experts get and return."""
    linears: Matrices


def _mlp(text: Mapping[str, Any], hidden: int, layers: int, *, gated: bool) -> _MLP:
    def matrices(inner: int) -> Matrices:
        gate = {"gate_proj": (hidden, inner)} if gated else {}
        return {**gate, "up_proj": (hidden, inner), "down_proj": (inner, hidden)}

    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((text[name] for name in names if text.get(name)), 0)
    if not experts:
        inner = text["intermediate_size"]
        one = _count(matrices(inner))
        return _MLP(layers * one, one, inner, 0, matrices(inner))
    inner, used = text.get("moe_intermediate_size") or text["intermediate_size"], text["num_experts_per_tok"]
    shared = text.get("shared_expert_intermediate_size") or text.get("n_shared_experts", 0) * inner
    beside = matrices(shared) if shared else {}
    dense = text.get("first_k_dense_replace") or len(text.get("mlp_only_layers", ()))
    sparse = (layers - dense) // text.get("decoder_sparse_step", 1)
    one = experts * (hidden + _count(matrices(inner))) + _count(beside)  # with the router
    full = (layers - sparse) and _count(matrices(text["intermediate_size"]))
    parameters = sparse * one + (layers - sparse) * full
    return _MLP(parameters, max(one, full), used * inner + shared, 2 * used * hidden, beside)


def _count(matrices: Matrices) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices.values())


def _latent(text: Mapping[str, Any], hidden: int, heads: int) -> Matrices:
    """Return the matrices of attention whose keys and values are compressed into one vector."""
    plain, turned, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    rank, small, asked = text["kv_lora_rank"], text.get("q_lora_rank"), heads * (plain + turned)
    asking = (
        {"q_a_proj": (hidden, small), "q_b_proj": (small, asked)} if small else {"q_proj": (hidden, asked)}
    )
    pair = {"kv_a_proj_with_mqa": (hidden, rank + turned), "kv_b_proj": (rank, heads * (plain + value))}
    return {**asking, **pair, "o_proj": (heads * value, hidden)}


def _recurrent(text: Mapping[str, Any], hidden: int) -> int:
    """Return the parameters of a gated delta net, which has states instead of keys."""
    heads, keys = text["linear_num_value_heads"], text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    mixed = 2 * keys + values
    return hidden * (mixed + 2 * values + 2 * heads) + text["linear_conv_kernel_dim"] * mixed


def _tower(vision: Mapping[str, Any], hidden: int) -> int:
    """Return about how many parameters a transformer over patches has, with what connects it to the text."""
    if not vision:
        return 0
    width = vision.get("embed_dim") or vision["hidden_size"]
    inner = vision.get("intermediate_size") or int(width * vision.get("mlp_ratio", 4))
    joined = width * (vision.get("spatial_merge_size") or 1) ** 2
    depth = vision.get("depth") or vision["num_hidden_layers"]
    return depth * (4 * width**2 + 2 * width * inner) + joined * (joined + hidden)
