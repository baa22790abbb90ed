"""Download an adapter from a server of the Tinker API, so that peft and transformers can load it."""

from __future__ import annotations

import io
import json
import tarfile
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv.core import AgentEnvError, logger

__all__ = ["fetch_adapter"]

log = logger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TIMEOUT_S = 600


def fetch_adapter(service: Any, trainer: Any, path: str, name: str, directory: Path) -> None:
    """Write the adapter of saved weights to a directory; say how to get it if it cannot be downloaded.

    Args:
        service: the server.
        trainer: the training client.
        path: the saved weights.
        name: name for files that the server has to make.
        directory: where the adapter is written.
    """
    try:
        for file, content in _download(service.files_of(trainer, path, name)).items():
            (directory / file).write_bytes(content)
        _complete(directory, service.model)
    except (AgentEnvError, OSError, tarfile.TarError, ValueError, KeyError) as error:
        text = (
            "the adapter %s stays at the server, from where the run is resumed, and cannot be downloaded: %r"
        )
        log.warning(text, path, error)


def _download(addresses: dict[str, str]) -> dict[str, bytes]:
    """Return the adapter's two files; a tar file may have them in folders, and nothing else is taken."""
    found: dict[str, bytes] = {}
    for name, address in addresses.items():
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the server's own
            content = answer.read()
        if PurePosixPath(name).name in {CONFIG, WEIGHTS}:
            found[PurePosixPath(name).name] = content
        elif not name:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                for member in archive:
                    file, held = PurePosixPath(member.name).name, archive.extractfile(member)
                    if file in {CONFIG, WEIGHTS} and held is not None:
                        found[file] = held.read()
    if found.keys() != {CONFIG, WEIGHTS}:
        raise ValueError(f"the server has {sorted(found) or 'no files'} instead of {CONFIG} and {WEIGHTS}")
    return found


def _complete(directory: Path, model: str) -> None:
    """Name the base model, and the adapted modules, which SkyRL leaves out."""
    from safetensors import safe_open

    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    with safe_open(str(directory / WEIGHTS), framework="pt") as weights:
        modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights.keys()}  # noqa: SIM118
    config["base_model_name_or_path"] = model
    config["target_modules"] = config.get("target_modules") or sorted(modules)
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
