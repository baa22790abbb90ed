"""Find and load a causal language model or a LoRA adapter, from a directory, a GGUF file or the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import file_digest
from io import StringIO
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from agentenv.core.cache import cache_directory
from agentenv.core.errors import DependencyMissing, ModelNotFound, UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.processor import computes_bfloat16, free_cores
from agentenv.core.visible import logger
from agentenv.engine.packaged import PACKAGED, packaged_model
from agentenv.render.vision.rules import FAMILIES

__all__ = [
    "ModelFiles",
    "adapter_on",
    "directory_of",
    "load_model",
    "locate",
    "no_progress_bar",
    "pick_device",
    "pick_dtype",
]

log = logger(__name__)

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
    location = Path(directory_of(path))
    if location.is_file():
        if location.suffix != ".gguf":
            raise ModelNotFound(
                f"{path} is a file, but not a .gguf file", remedy="name the model's directory or a .gguf file"
            )
        return ModelFiles(str(location.parent), location.name)
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
        names = ", ".join(ggufs)
        raise UsageError(f"{path} holds {len(ggufs)} GGUF files ({names})", remedy="name one of them")
    if not ggufs:
        lacks = f"it has no config.json, no .gguf file and no {ADAPTER_CONFIG}"
        raise ModelNotFound(f"the directory {path} holds no model: {lacks}")
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
    if (kind := config.get("peft_type")) != "LORA":
        raise UsageError(f"the adapter at {directory} has the type {kind}", remedy="use one of type LORA")
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


def directory_of(path: str, *files: str) -> str:
    """Return where a model is. Of one of the Hub, the files (all by default) are downloaded if needed."""
    location = Path(path).expanduser()
    if location.exists():
        return str(location)
    if path in PACKAGED:
        return packaged_model(path)
    if path.startswith(("/", ".", "~")) or path.count("/") != 1 or path.endswith(".gguf"):
        raise ModelNotFound(f"there is no model at {path!r}; a Hub id is written OWNER/NAME")
    DependencyMissing.require("huggingface_hub", extra="train", purpose=f"the model {path!r}")
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with suppress(LocalEntryNotFoundError):
            return snapshot_download(path, allow_patterns=list(files) or None, local_files_only=True)
        model_info(path, timeout=5)  # ends soon without a network, which a download waits for
        return snapshot_download(path, allow_patterns=list(files) or None)
    except Exception as error:  # noqa: BLE001 - the Hub client raises many unrelated types
        raise ModelNotFound(
            f"{path!r} is not here, and the Hugging Face Hub did not provide it: {first_line_of(error)}",
            remedy="check the name and the network, or name the directory of a model on this machine",
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
    if where == "cpu":
        _leave_busy_cores()
    if where == "cpu" and options["dtype"] == pick_dtype("float32", where):
        lay_out_for_few_rows(model)
    return model


@cache
def _leave_busy_cores() -> None:
    """Let torch compute with the cores that are free now: threads that wait for a busy core spin meanwhile.

    Once for a process, and never with more threads than before.
    """
    import torch

    threads = torch.get_num_threads()
    if threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    if (free := free_cores()) < threads:
        torch.set_num_threads(free)
        log.warning(
            "torch computes with %d of %d threads, because other processes or a quota leave no more cores; "
            "the variable OMP_NUM_THREADS sets another number",
            free,
            threads,
        )


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


_reading = Lock()  # what two loads at once replace, the second would put back as the first has made it
LARGEST_KEPT = 2**30
"""Bytes of unpacked weights that are kept. The disk pays for larger ones more than the next load gains."""


def load_gguf(file: Path, dtype: Any) -> Any:
    """Return the model of a GGUF file with plain weights of a torch dtype, which can be trained and saved.

    The second load of the same bytes reads what the first one unpacked. Where nothing can be kept, such as
    on a full disk, each load unpacks.
    """
    from transformers import AutoModelForCausalLM

    with file.open("rb") as opened:
        digest = file_digest(opened, "sha256").hexdigest()[:32]
    kept = cache_directory() / "gguf" / f"{digest}-{str(dtype).removeprefix('torch.')}"
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    if kept.is_dir():
        try:
            return _named(AutoModelForCausalLM.from_pretrained(kept, **options), file)
        except Exception:  # noqa: BLE001 - files that were cut off can lead transformers to any exception
            rmtree(kept, ignore_errors=True)
    # The reader draws a progress bar of its own, which cannot be switched off.
    with _reading, redirect_stderr(StringIO()), _read_once():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, **options, **_plain_weights()
        )
    _forget_quantization(model)
    if sum(weight.nbytes for weight in model.parameters()) <= LARGEST_KEPT:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=kept.parent) as made:
                model.save_pretrained(Path(made) / "model")
                (Path(made) / "model").rename(kept)
    return _named(model, file)


@contextmanager
def _read_once() -> Generator[None]:
    """Let transformers parse a GGUF file once, and make its map of names once instead of once a module."""
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in before.items():
            setattr(gguf, name, lru_cache(maxsize=1)(function))
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def _named(model: Any, file: Path) -> Any:
    """Give a model the name of its GGUF file's directory, which an adapter made of it will record."""
    model.name_or_path = model.config.name_or_path = str(file.parent)
    return model


def _plain_weights() -> dict[str, Any]:
    """Return the options that make transformers unpack the weights of a GGUF file into plain tensors.

    Newer versions can keep them packed, which cannot be trained. Older ones have no such option, because
    they always unpack.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _forget_quantization(model: Any) -> None:
    """Remove the quantization settings of a model from a GGUF file, whose weights are plain tensors.

    Transformers would otherwise treat it as quantized and refuse to convert or save it.
    """
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
