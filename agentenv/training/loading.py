"""Load the model and the tokenizer of a training run, in the same way as the transformers engine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.visible import logger
from agentenv.engine.hf.adapters import base_model
from agentenv.engine.hf.load import load_model as load
from agentenv.engine.hf.load import locate, pick_device, require_whole
from agentenv.engine.hf.positions import fix_frequencies
from agentenv.engine.hf.vision import Vision, vision_of
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.adapters import SAME_NATS, adapter_of, base_changing, probe
from agentenv.training.learners.torch.world import num_processes

if TYPE_CHECKING:
    from agentenv.training.learners.torch.blank import Unread

__all__ = ["find_model", "find_teacher", "find_vision", "load_model", "load_tokenizer", "require_reloads"]

log = logger(__name__)


def find_model(given: Any, config: GRPOConfig) -> tuple[str, Any, Unread | None]:
    """Return the name of the model to train, and the model, whose numbers are those of the engines.

    The weights of a model that is to be sharded are not read yet, if they can be read in parts. They are the
    third value; it is None for a model that has its weights.

    A model that caps its attention scores gets an attention that applies the cap, and position frequencies
    that depend on the longest row of a pass are fixed; see `agentenv.engine.hf.positions`.

    Args:
        given: a path or Hub id, or a model from transformers; None means `config.model`.
        config: the run's options.

    Raises:
        ModelNotFound: The model cannot be loaded.
        UsageError: No model is named, the numbers of its rows depend on the longest row beside them, or the
            processes cannot be divided as `fsdp` says.
    """
    from agentenv.engine.hf.attention import apply_soft_cap

    source = config.model if given is None else given
    sharded = config.shard_size(num_processes()) > 1
    unread = None
    if not isinstance(source, (str, Path)):
        name, model = config.model, source
        if config.device != "auto" and not str(model.device).startswith(pick_device(config.device)):
            raise UsageError(
                f"device is {config.device}, and the model is on {model.device}", remedy="leave device out"
            )
    elif str(source):
        name = str(source)
        model, unread = _unread_model(name, config) if sharded else (None, None)
        model = load_model(name, config) if model is None else model
    else:
        raise UsageError(
            "no model is named", remedy="set GRPOConfig.model to a path or Hub id, or pass model="
        )
    apply_soft_cap(base_model(model))
    # Without weights it is the policy's own check that compares numbers.
    fix_frequencies(base_model(model), check=unread is None)
    return name, model, unread


def _unread_model(name: str, config: GRPOConfig) -> tuple[Any, Unread | None]:
    """Return a model that is to be sharded, and its files; None if it must be loaded whole."""
    from agentenv.training.unread import Refused, unread_model  # here, because only shards are read so

    try:
        model, unread = unread_model(locate(name), config)
    except Refused as error:
        log.warning("each process loads %s whole before it is sharded, because %s", name, error)
        return None, None
    _remember_name(model, name)
    return model, unread


def find_teacher(config: GRPOConfig, student: str, tokenizer: ChatTokenizer | None = None) -> Any:
    """Return the model that `config.loss.teacher` names, or what asks its server; None if it names none.

    Args:
        config: the run's options.
        student: name of the model to train; empty if it was passed as an object.
        tokenizer: its tokenizer; None loads the one beside the named model.

    Raises:
        ModelNotFound: The teacher cannot be loaded.
        EngineUnavailable: The teacher's server does not answer.
        UsageError: The teacher is only an adapter, or its tokens are not those of the student.
    """
    teacher = config.loss.teacher
    if not teacher:
        return None
    if tokenizer is None and student:
        tokenizer = load_tokenizer(student)
    if config.loss.teacher_is_served:
        # It brings the client of vLLM's servers, which other trainings do without.
        from agentenv.training.served_teacher import ServedTeacher

        return ServedTeacher(teacher, tokenizer)
    require_whole(locate(teacher), "a teacher")
    if tokenizer is not None and not _same_tokens(tokenizer, load_tokenizer(teacher)):
        whose = student or "the model in training"
        raise UsageError(
            f"the tokens of the teacher {teacher} are not those of {whose}",
            remedy="name a teacher with the same tokenizer, such as a larger model of the same family",
        )
    # A teacher is loaded whole, because only the policy's weights are read part by part.
    return find_model(load_model(teacher, config), config)[1]


def find_vision(model: Any, name: str, tokenizer: ChatTokenizer | None) -> Vision | None:
    """Return what a model sees with; None if it sees nothing.

    Args:
        model: the loaded model.
        name: its name; empty if it was passed as an object.
        tokenizer: its tokenizer, whose rule says what images become; None loads the one beside the model.
    """
    base = base_model(model)
    if not hasattr(base, "get_image_features"):
        return None
    if tokenizer is None and name:
        tokenizer = load_tokenizer(name)
    return vision_of(base, None if tokenizer is None else tokenizer.images)


def _same_tokens(one: ChatTokenizer, other: ChatTokenizer) -> bool:
    return one.backend.get_vocab() == other.backend.get_vocab()


def require_reloads(model: Any) -> None:
    """Refuse an adapter that has changed its base if its files, read back, are another policy.

    Raises:
        UsageError: They are, or they do not say what the base is.
    """
    if not (kind := base_changing(model)):
        return
    remedy = "merge the adapter into the model (peft's merge_and_unload), and train a new one"
    first = next(model.parameters())
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        nested = Path(folder, adapter_of(model) or "")
        try:
            files = locate(str(nested if nested.is_dir() else folder))
            read = load(files, dtype=str(first.dtype).removeprefix("torch."), device=str(first.device))
        except Exception as error:  # what initialises such adapters may need other packages or data
            told = (
                f"the adapter ({kind}) has changed the base model, and cannot be read back from its files: "
            )
            raise UsageError(f"{told}{first_line_of(error)}", remedy=remedy) from error
    difference = float((probe(model) - probe(read)).abs().max())
    if not difference <= SAME_NATS:
        raise UsageError(
            f"the adapter ({kind}) has changed the base model, and read back from its files it is another "
            f"policy: {difference:.2g} nats a token",
            remedy=remedy,
        )


def load_model(name: str, config: GRPOConfig) -> Any:
    """Load a causal language model, or an adapter with its base, from a directory, a .gguf file or the Hub.

    Raises:
        ModelNotFound: The model cannot be loaded.
    """
    wide, dtype = config.dtype == "float64", config.dtype
    if wide or (dtype == "auto" and config.lora is None and pick_device(config.device).startswith("cpu")):
        dtype = "float32"
    model = load(locate(name), dtype=dtype, device=config.device)
    _remember_name(model, name)
    return model.double() if wide else model


def _remember_name(model: Any, name: str) -> None:
    # peft saves this name as the base of an adapter. It must be the path or the Hub id that the user passed,
    # not the folder of a .gguf file or a path in the cache of the Hub.
    path = Path(name).expanduser()
    model.name_or_path = str(path.absolute()) if path.exists() else name


def load_tokenizer(name: str) -> ChatTokenizer:
    """Load the tokenizer that is stored with a model.

    Raises:
        ModelNotFound: The model or its tokenizer does not exist.
    """
    files = locate(name).tokenizer
    return ChatTokenizer.load(files.path, gguf_file=files.gguf_file)
