"""Load a GGUF file, and keep its unpacked weights: transformers takes half a minute to unpack 135M."""

from __future__ import annotations

from contextlib import redirect_stderr, suppress
from hashlib import file_digest
from io import StringIO
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from agentenv.core.cache import cache_directory

__all__ = ["load_gguf"]

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
    with redirect_stderr(StringIO()):
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
