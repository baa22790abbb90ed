"""Find and load a causal language model or a LoRA adapter, from a directory, a GGUF file or the Hub."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.core.errors import DependencyMissing, ModelNotFound, UsageError
from agentenv.core.processor import computes_bfloat16
from agentenv.engine.hf.gguf import load_gguf
from agentenv.engine.packaged import PACKAGED, packaged_model
from agentenv.render.vision.rules import FAMILIES

__all__ = [
    "ModelFiles",
    "adapter_on",
    "load_model",
    "locate",
    "no_progress_bar",
    "pick_device",
    "pick_dtype",
]

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model."""

    path: str
    """Directory of the model."""
    gguf_file: str | None = None
    """Name of the GGUF file in the directory; None for a model in another format."""
    base: ModelFiles | None = None
    """Files of the base model if the directory holds a LoRA adapter, else None."""

    @property
    def tokenizer(self) -> ModelFiles:
        """The files with the tokenizer: those of the adapter if it has one, else those of the base model."""
        return self if self.base is None or _has_tokenizer(Path(self.path)) else self.base


def locate(path: str) -> ModelFiles:
    """Find the files of a model without importing torch or transformers.

    Args:
        path: directory, .gguf file, name on the Hub, or name of a packaged model such as `smollm2`.

    Raises:
        DependencyMissing: The package of a packaged model is not installed.
        ModelNotFound: The path does not exist, has no weights, or is an adapter without base model.
        UsageError: The directory has several GGUF files and no other weights, or an adapter that is not
            a LoRA.
    """
    location = Path(path).expanduser()
    if path in PACKAGED and not location.exists():
        location = Path(packaged_model(path))
    if location.is_file():
        if location.suffix != ".gguf":
            raise ModelNotFound(
                f"{path} is a file, but not a .gguf file", remedy="name the model's directory or a .gguf file"
            )
        return ModelFiles(str(location.parent), location.name)
    if not location.is_dir():
        location = Path(_from_hub(path))
        return _adapter_files(location) if _is_adapter(location) else ModelFiles(str(location))
    if _is_adapter(location):
        return _adapter_files(location)
    if (location / "config.json").is_file():
        if not any(next(location.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
            raise ModelNotFound(
                f"the model directory {path} has a config.json but no weights ({', '.join(WEIGHT_PATTERNS)})",
                remedy="download it again, if the download was cut off",
            )
        return ModelFiles(str(location))
    ggufs = sorted(file.name for file in location.glob("*.gguf"))
    if len(ggufs) > 1:
        raise UsageError(
            f"{path} holds {len(ggufs)} GGUF files ({', '.join(ggufs)})", remedy="name one of them"
        )
    if not ggufs:
        raise ModelNotFound(
            f"the directory {path} holds no model: it has no config.json, no .gguf file "
            f"and no {ADAPTER_CONFIG}"
        )
    return ModelFiles(str(location), ggufs[0])


def require_tokenizer(files: ModelFiles) -> None:
    """Raise ModelNotFound if a local directory has no tokenizer."""
    directory = Path(files.tokenizer.path)
    if files.tokenizer.gguf_file or not directory.is_dir() or _has_tokenizer(directory):
        return
    raise ModelNotFound(
        f"the model directory {directory} has no tokenizer ({', '.join(TOKENIZER_FILES)})",
        remedy="name a directory that has one with --tokenizer",
    )


def require_whole(files: ModelFiles, engine: str) -> None:
    """Raise UsageError if the files are an adapter; for engines that need a whole model."""
    if files.base is not None:
        raise UsageError(
            f"{files.path} is a LoRA adapter of {files.base.path}, and {engine} needs a whole model",
            remedy="merge it with peft's merge_and_unload(), or load it with hf:",
        )


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def _is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def _adapter_files(directory: Path) -> ModelFiles:
    """Return the files of an adapter and of the base model that it names."""
    try:
        config: dict[str, Any] = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{directory / ADAPTER_CONFIG} is not JSON: {error}") from None
    if config.get("peft_type") != "LORA":
        raise UsageError(
            f"the adapter at {directory} has the type {config.get('peft_type')}",
            remedy="use one of type LORA",
        )
    if not any(directory.glob("adapter_model.*")):
        raise ModelNotFound(
            f"the adapter at {directory} has no weights (adapter_model.*)",
            remedy="download it again, if the download was cut off",
        )
    name = str(config.get("base_model_name_or_path") or "")
    if not name:
        raise ModelNotFound(
            f"the adapter at {directory} does not name its base model",
            remedy=f"write its path into base_model_name_or_path of {ADAPTER_CONFIG}",
        )
    if _is_adapter(Path(name).expanduser()):
        raise UsageError(f"the adapter at {directory} names another adapter as its base model: {name}")
    try:
        return ModelFiles(str(directory), base=locate(name))
    except ModelNotFound as error:
        raise ModelNotFound(
            f"the adapter at {directory} cannot be used without its base model: {error}",
            remedy=f"write its path into base_model_name_or_path of {ADAPTER_CONFIG}",
        ) from None


def _from_hub(path: str) -> str:
    looks_like_path = path.startswith(("/", ".", "~")) or path.count("/") != 1 or path.endswith(".gguf")
    if looks_like_path:
        raise ModelNotFound(f"there is no model at {path!r}, because there is no such file or directory")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise DependencyMissing.of("huggingface_hub", "train", purpose=f"the model {path!r}") from None
    try:
        with suppress(LocalEntryNotFoundError):
            return snapshot_download(path, local_files_only=True)
        return snapshot_download(path)
    except Exception as error:  # noqa: BLE001 - the Hub client raises many unrelated types
        raise ModelNotFound(
            f"there is no directory {path!r}, and the Hugging Face Hub could not provide it: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from None


def pick_device(device: str) -> str:
    """Return the device for a name; "auto" means CUDA if there is a GPU, else the CPU.

    Raises:
        UsageError: The name asks for CUDA, but torch finds no GPU.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"device {device!r} cannot be used, because torch {torch.__version__} finds no CUDA",
            remedy="leave device out, or set it to cpu",
        )
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str) -> Any:
    """Return the torch dtype for a name.

    "auto" means bfloat16 on CUDA and on processors with bfloat16 instructions, else float32, because
    bfloat16 is several times slower than float32 without such instructions.

    Raises:
        UsageError: The name is unknown.
    """
    import torch

    if dtype == "auto":
        if not device.startswith("cpu"):
            return torch.bfloat16
        return torch.bfloat16 if computes_bfloat16() else torch.float32
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
    """Load a causal language model in evaluation mode; an adapter is loaded on its base model, trainable.

    Raises:
        DependencyMissing: torch, transformers, or (for an adapter) peft is not installed.
        ModelNotFound: The files cannot be read as a model.
    """
    if files.base is not None:
        return adapter_on(load_model(files.base, dtype=dtype, device=device), files.path, files.base)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError:
        raise DependencyMissing.of("torch and transformers", "train", purpose="hf: models") from None
    where = pick_device(device)
    # Said outright, because transformers else asks at a terminal whether the directory's own code may run.
    options: dict[str, Any] = {"dtype": pick_dtype(dtype, where), "trust_remote_code": False}
    try:
        with no_progress_bar():
            if files.gguf_file:
                model = load_gguf(Path(files.path) / files.gguf_file, options["dtype"])
            else:
                # A model that sees is loaded with its tower. One class for text alone would drop it silently.
                config = AutoConfig.from_pretrained(files.path, trust_remote_code=False)
                sees = config.model_type in FAMILIES
                auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
                model = auto.from_pretrained(files.path, **options)
    except Exception as error:  # files that somebody else wrote can lead transformers to any exception
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelNotFound(
            f"the model at {files.path} cannot be loaded: {type(error).__name__}: {first}"
        ) from error
    model = model.to(where).eval()
    if where == "cpu" and options["dtype"] == pick_dtype("float32", where):
        lay_out_for_few_rows(model)
    return model


def adapter_on(model: Any, path: str, base: ModelFiles) -> Any:
    """Return a model with the LoRA adapter of a directory on it, trainable, in evaluation mode.

    Raises:
        DependencyMissing: peft is not installed.
        ModelNotFound: The adapter does not fit the model.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise DependencyMissing.of("peft", "train", purpose=f"the LoRA adapter at {path}") from None
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
    """Switch off the progress bars of transformers, which would disturb ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def lay_out_for_few_rows(model: Any) -> None:
    """Store the matrices input-major: the numbers stay the same, and only the strides change.

    Decoding multiplies a few rows with every matrix. On the CPU in float32 this layout makes that two to
    five times as fast at 8 to 32 rows, and equally fast at many rows. A matrix that is also an embedding
    keeps its layout, because transformers cannot save tied tensors with different strides.
    """
    from torch.nn import Embedding, Linear

    tied = {id(module.weight) for module in model.modules() if isinstance(module, Embedding)}
    for module in model.modules():
        if isinstance(module, Linear) and id(module.weight) not in tied:
            module.weight.data = module.weight.data.t().contiguous().t()
