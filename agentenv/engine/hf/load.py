"""Find and load a causal language model, or a LoRA adapter of one: a directory, a GGUF file, the Hub."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from agentenv.core.errors import DependencyMissing, ModelNotFound, UsageError

__all__ = ["ModelFiles", "load_model", "locate", "no_progress_bar", "pick_device", "pick_dtype"]

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies."""

    path: str
    """A directory, or a repository of the Hugging Face Hub."""
    gguf_file: str | None = None
    """Name of the GGUF file in the directory, if the model is one."""
    base: ModelFiles | None = None
    """Of the model that is changed, if the directory holds a LoRA adapter."""

    @property
    def tokenizer(self) -> ModelFiles:
        """Where the tokenizer lies: beside an adapter, else beside its base model."""
        return self if self.base is None or _has_tokenizer(Path(self.path)) else self.base


def locate(path: str) -> ModelFiles:
    """Say where a model lies, before anything heavy is imported.

    Raises:
        ModelNotFound: There is no such path, a directory without weights, or an adapter without its base.
        UsageError: A directory has several GGUF files and no other weights, or an adapter of another
            kind than LoRA.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix != ".gguf":
            raise ModelNotFound(
                f"{path} is a file, but no .gguf", remedy="name the model's directory or a .gguf file"
            )
        return ModelFiles(str(place.parent), place.name)
    if not place.is_dir():
        place = Path(_from_hub(path))
        return _adapter_files(place) if _is_adapter(place) else ModelFiles(str(place))
    if _is_adapter(place):
        return _adapter_files(place)
    if (place / "config.json").is_file():
        if not any(next(place.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
            raise ModelNotFound(
                f"the model directory {path} has a config.json but no weights ({', '.join(WEIGHT_PATTERNS)})",
                remedy="was the download cut off?",
            )
        return ModelFiles(str(place))
    ggufs = sorted(file.name for file in place.glob("*.gguf"))
    if len(ggufs) > 1:
        raise UsageError(
            f"{path} holds {len(ggufs)} GGUF files ({', '.join(ggufs)})", remedy="name one of them"
        )
    if not ggufs:
        raise ModelNotFound(
            f"the directory {path} holds no model: neither a config.json nor a .gguf file "
            f"nor an {ADAPTER_CONFIG}"
        )
    return ModelFiles(str(place), ggufs[0])


def require_tokenizer(files: ModelFiles) -> None:
    """Raise ModelNotFound if a local directory has no tokenizer."""
    place = Path(files.tokenizer.path)
    if files.tokenizer.gguf_file or not place.is_dir() or _has_tokenizer(place):
        return
    raise ModelNotFound(
        f"the model directory {place} has no tokenizer ({', '.join(TOKENIZER_FILES)})",
        remedy="name a directory that has one with --tokenizer",
    )


def require_whole(files: ModelFiles, engine: str) -> None:
    """Raise UsageError if a model is an adapter, for an engine that takes whole models only."""
    if files.base is not None:
        raise UsageError(
            f"{files.path} is a LoRA adapter of {files.base.path}, and {engine} starts from a whole model: "
            "merge it with peft's merge_and_unload(), or play it with hf:"
        )


def _has_tokenizer(place: Path) -> bool:
    return any((place / name).is_file() for name in TOKENIZER_FILES)


def _is_adapter(place: Path) -> bool:
    return (place / ADAPTER_CONFIG).is_file() and not (place / "config.json").is_file()


def _adapter_files(place: Path) -> ModelFiles:
    """Return where an adapter and the base model named in it lie."""
    try:
        config: dict[str, Any] = json.loads((place / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{place / ADAPTER_CONFIG} is not JSON: {error}") from None
    if config.get("peft_type") != "LORA":
        raise UsageError(
            f"the adapter at {place} is of the kind {config.get('peft_type')}", remedy="only LORA is taken"
        )
    if not any(place.glob("adapter_model.*")):
        raise ModelNotFound(
            f"the adapter at {place} has no weights (adapter_model.*)", remedy="was the download cut off?"
        )
    name = str(config.get("base_model_name_or_path") or "")
    if not name:
        raise ModelNotFound(
            f"the adapter at {place} does not say which model it changes: "
            f"write where that lies into base_model_name_or_path of {ADAPTER_CONFIG}"
        )
    if _is_adapter(Path(name).expanduser()):
        raise UsageError(f"the adapter at {place} names another adapter as its base model: {name}")
    try:
        return ModelFiles(str(place), base=locate(name))
    except ModelNotFound as error:
        raise ModelNotFound(
            f"the adapter at {place} cannot be used without its base model: {error}",
            remedy=f"write where it lies into base_model_name_or_path of {ADAPTER_CONFIG}",
        ) from None


def _from_hub(path: str) -> str:
    looks_like_path = path.startswith(("/", ".", "~")) or path.count("/") != 1 or path.endswith(".gguf")
    if looks_like_path:
        raise ModelNotFound(f"there is no model at {path!r}: no such file or directory")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise DependencyMissing.of("huggingface_hub", "train", purpose=f"the model {path!r}") from None
    try:
        with suppress(LocalEntryNotFoundError):
            return snapshot_download(path, local_files_only=True)
        return snapshot_download(path)
    except Exception as error:  # noqa: BLE001 - the Hub client raises many unrelated kinds
        raise ModelNotFound(
            f"there is no directory {path!r} and it cannot be had from the Hugging Face Hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from None


def pick_device(device: str) -> str:
    """Return the device that "auto" stands for: CUDA where there is one.

    Raises:
        UsageError: CUDA is asked for, and torch finds none here.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"device {device!r} is not here: torch {torch.__version__} finds no CUDA",
            remedy="leave device out, or set it to cpu",
        )
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str) -> Any:
    """Return the torch dtype that a name stands for.

    "auto" is bfloat16 on CUDA and on processors that multiply it in hardware, else float32:
    without such instructions bfloat16 is several times slower than float32.

    Raises:
        UsageError: The name is unknown.
    """
    import torch

    if dtype == "auto":
        if not device.startswith("cpu"):
            return torch.bfloat16
        able: Any = torch.cpu
        fast = able._is_avx512_bf16_supported() or able._is_amx_tile_supported()  # noqa: SLF001
        return torch.bfloat16 if fast else torch.float32
    names = {
        "float32": torch.float32,
        "f32": torch.float32,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float16": torch.float16,
        "f16": torch.float16,
    }
    if dtype not in names:
        raise UsageError(f"dtype {dtype!r} is unknown", remedy=f"use auto, {', '.join(names)}")
    return names[dtype]


def load_model(files: ModelFiles, *, dtype: str = "auto", device: str = "auto") -> Any:
    """Load a causal language model, in evaluation mode; an adapter comes on its base, to be trained on.

    Raises:
        DependencyMissing: torch or transformers is not installed, or peft for an adapter.
        ModelNotFound: The files cannot be read as a model.
    """
    if files.base is not None:
        return _load_adapter(files.path, files.base, dtype=dtype, device=device)
    try:
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise DependencyMissing.of("torch and transformers", "train", purpose="hf: models") from None
    where = pick_device(device)
    auto: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": pick_dtype(dtype, where)}
    if files.gguf_file:
        options["gguf_file"] = files.gguf_file
    try:
        # The GGUF reader draws its own progress bar, which no switch turns off.
        with no_progress_bar(), redirect_stderr(StringIO()) if files.gguf_file else nullcontext():
            model = auto.from_pretrained(files.path, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelNotFound(
            f"the model at {files.path} cannot be loaded: {type(error).__name__}: {first}"
        ) from error
    if files.gguf_file:
        forget_quantization(model)
    model = model.to(where).eval()
    if where == "cpu" and options["dtype"] == pick_dtype("float32", where):
        lay_out_for_few_rows(model)
    return model


def _load_adapter(path: str, base: ModelFiles, *, dtype: str, device: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise DependencyMissing.of("peft", "train", purpose=f"the LoRA adapter at {path}") from None
    model = load_model(base, dtype=dtype, device=device)
    adapters: Any = PeftModel
    try:
        loaded = adapters.from_pretrained(model, path, is_trainable=True, torch_device=str(model.device))
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelNotFound(
            f"the adapter at {path} does not fit the model at {base.path}: {type(error).__name__}: {first}"
        ) from error
    return loaded.eval()


@contextmanager
def no_progress_bar() -> Generator[None]:
    """Keep transformers from drawing bars over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def lay_out_for_few_rows(model: Any) -> None:
    """Keep the matrices input-major: the same numbers with other strides.

    Decoding multiplies a few rows with every matrix. On the CPU in float32 that is two to five times
    as fast in this order at 8 to 32 rows, and equally fast at many. A matrix that is also an
    embedding's stays as it is, because transformers cannot save tied tensors of other strides.
    """
    from torch.nn import Embedding, Linear

    looked_up = {id(one.weight) for one in model.modules() if isinstance(one, Embedding)}
    for module in model.modules():
        if isinstance(module, Linear) and id(module.weight) not in looked_up:
            module.weight.data = module.weight.data.t().contiguous().t()


def forget_quantization(model: Any) -> None:
    """Make a model read from a GGUF file an ordinary one: its weights are plain tensors already.

    Transformers goes on calling it quantized and would refuse to save it.
    """
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
