"""The forward passes of the transformers engine: rows of keys and values, and passes that add tokens to them.

The numbers of a row do not depend on the rows beside it: each has its own columns and positions, and columns
that are not its own are masked and finite. This module does not know requests.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from agentenv.core.errors import UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.routed_experts import RoutedExperts
from agentenv.engine.hf.adapters import base_model
from agentenv.engine.hf.attention import attention_windows, masks, use_grouped_attention
from agentenv.engine.hf.experts import ExpertRecorder
from agentenv.engine.hf.positions import fix_frequencies
from agentenv.engine.hf.seeing import Sight
from agentenv.engine.hf.vision import Vision

__all__ = ["Parts", "Passes", "Rows"]

TOGETHER = 16
"""Most parts of `Rows` that are one tensor on CUDA, where each copy is a launch: a row joins, is kept and
leaves by one copy for each tensor. If all were one, growing rows would take twice their memory."""
STEP = 8
"""On CUDA a pass attends over a multiple of so many columns, because kernels copy a mask of another width."""
# The check at construction runs this many tokens, of which the last ones are decoded one by one.
CHECK_TOKENS = 16
CHECK_DECODED = 4
LONGEST_CHECKED_WINDOW = 1024

Parts: TypeAlias = Sequence[Tensor]
"""What one row holds in each tensor of `Rows`, `[parts, heads, columns, numbers]`."""


class Rows(Cache):
    """The keys and values of the live rows, into which a transformers model writes.

    The parts are keys and values of each layer in turn, then the choices of routers, if they are told. Parts
    of one shape lie in one tensor, `[parts, rows, heads, columns, numbers]`, up to `together` of them.

    Args:
        together: most parts of a tensor.
        step: a pass attends over a multiple of so many columns.
    """

    # Invariant: row `r` of every part holds what belongs to the tokens of live row `r` from column 0 on,
    # `lengths[r]` columns of it. The live rows are 0, 1, 2, ... without gaps.
    # Invariant: all other columns are zero, so that a mask weight of 0 hides them. A row whose numbers are
    # not finite must leave before the next pass, because a mask does not hide NaN (0 * NaN is NaN).
    # Invariant: rows times columns are at most `limit`, as long as the live rows fit into it, each with less
    # than a step more. While the tensors are made anew, the old and the new one of only one of them exist at
    # the same time.

    def __init__(self, *, together: int = 1, step: int = 1) -> None:
        super().__init__(layers=[])
        self._together, self._step = together, step
        self._kinds: list[Tensor] = []
        """An empty tensor for each part, which are known from the first pass on."""
        self._places: list[tuple[int, int]] = []
        """The tensor of each part, and its index there."""
        self.tensors: list[Tensor] = []
        self.lengths: list[int] = []
        self.shifts: list[int] = []
        """The position after each row's last token, less its length; see `Sight.shift`."""
        self.limit = sys.maxsize
        self._size = (0, 0)
        self._rows = slice(0)
        self.width = 0
        """Number of columns that the present pass attends over."""
        self._new: Tensor | None = None
        self._to: tuple[Tensor, Tensor] | None = None

    def plan(self, first: int, counts: Sequence[int], device: torch.device) -> Tensor:
        """Make room for a pass in which each row from `first` on gets new tokens.

        Returns:
            The column of each token, `[B, T]`. The tokens stand on the right; pads have columns of earlier
            tokens of their row, or negative ones.
        """
        starts = torch.tensor(self.lengths[first : first + len(counts)])[:, None]
        ends = starts + torch.tensor(counts)[:, None]
        self.width = -(-int(ends.max()) // self._step) * self._step
        self.reserve(first + len(counts), self.width)
        self._rows = slice(first, first + len(counts))
        columns = ends - max(counts) + torch.arange(max(counts))
        new = columns >= starts
        # Pads are not stored, so that rows have no gaps.
        self._new = None if new.all() else new.to(device)
        rows = torch.arange(first, first + len(counts))[:, None].expand_as(columns)
        self._to = rows[new].to(device), columns[new].to(device)
        return columns.to(device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a layer, and return those that the rows of the pass attend over."""
        return self.write(2 * layer_idx, key_states), self.write(2 * layer_idx + 1, value_states)

    def write(self, index: int, new: Tensor) -> Tensor:
        """Write `[B, heads, T, numbers]` into a part; return the columns of the rows of the pass."""
        assert self._to is not None
        if index == len(self._kinds):
            self._kinds.append(new.new_empty(0, new.shape[1], 0, new.shape[3]))
            self._places.append((len(self.tensors), 0))
            self.tensors.append(self._blank(new[None, :0]))
        tokens = new.transpose(1, 2)
        rows, columns = self._to
        part = self.part(index)
        part[rows, :, columns] = tokens.flatten(0, 1) if self._new is None else tokens[self._new]
        return part[self._rows, :, : self.width]

    @property
    def num_parts(self) -> int:
        """Number of parts, 0 before the first pass."""
        return len(self._kinds)

    def part(self, index: int) -> Tensor:
        """Return a part, `[rows, heads, columns, numbers]`."""
        tensor, place = self._places[index]
        return self.tensors[tensor][place]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest live row, which only transformers reads and nothing depends on."""
        return max(self.lengths, default=0)

    def view(self, row: int, length: int) -> Parts:
        """Return the first columns of a row, as they lie here."""
        return [tensor[:, row, :, :length] for tensor in self.tensors]

    def add(self, parts: Parts, length: int, shift: int) -> None:
        """Add a live row, which begins with the first columns of what was copied or viewed."""
        self.reserve(len(self.lengths) + 1, max(length, 1))
        for tensor, part in zip(self.tensors, parts, strict=True) if length else ():
            tensor[:, len(self.lengths), :, :length] = part[:, :, :length]
        self.lengths.append(length)
        self.shifts.append(shift)

    def remove(self, row: int) -> None:
        """Remove a row; the last live row moves into its place."""
        last, width = len(self.lengths) - 1, max(self.lengths[row], self.lengths[-1])
        for tensor in self.tensors:
            if row != last:
                tensor[:, row, :, :width] = tensor[:, last, :, :width]
            tensor[:, last, :, :width] = 0
        self.lengths[row], self.shifts[row] = self.lengths[last], self.shifts[last]
        self.lengths.pop()
        self.shifts.pop()

    def clear(self) -> None:
        """Forget every row and free the memory."""
        self.tensors, self.lengths, self.shifts, self._size = [], [], [], (0, 0)
        self._places = list[tuple[int, int]]()
        sizes, last = list[int](), dict[tuple[int, int, torch.dtype], int]()
        for kind in self._kinds:
            key = kind.shape[1], kind.shape[3], kind.dtype
            if key not in last or sizes[last[key]] == self._together:
                last[key] = len(sizes)
                sizes.append(0)
            self._places.append((last[key], sizes[last[key]]))
            sizes[last[key]] += 1

    @property
    def column_bytes(self) -> int:
        """Size of one column of one row in all parts."""
        return sum(kind.shape[1] * kind.shape[3] * kind.itemsize for kind in self._kinds)

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many rows of at least so many columns."""
        had_rows, had_columns = self._size
        fits = rows <= had_rows and columns <= had_columns
        if fits and had_rows * had_columns <= self.limit:
            return
        rows, columns = max(rows, len(self.lengths)), max(columns, *self.lengths, 1)
        # Rows double and columns grow by half, so that copying costs each token a constant share. Beyond the
        # limit only what is needed is made: the rows before were many and short, or few and long.
        more_rows = had_rows if rows <= had_rows else 1 << (rows - 1).bit_length()
        more_columns = (
            had_columns if columns <= had_columns else -(-max(columns, had_columns * 3 // 2) // 64) * 64
        )
        rows = max(rows, min(more_rows, self.limit // columns))
        columns = max(columns, min(more_columns, self.limit // rows))
        if (rows, columns) == self._size:
            return
        self._size = rows, columns
        live, longest = len(self.lengths), max(self.lengths, default=0)
        for index, old in enumerate(self.tensors):
            self.tensors[index] = new = self._blank(old)
            new[:, :live, :, :longest] = old[:, :live, :, :longest]
        if not self.tensors and self._kinds:
            counts = Counter(tensor for tensor, _ in self._places)
            likes = {tensor: kind for kind, (tensor, _) in zip(self._kinds, self._places, strict=True)}
            self.tensors = [
                self._blank(likes[tensor].expand(counts[tensor], *likes[tensor].shape))
                for tensor in sorted(likes)
            ]

    def _blank(self, like: Tensor) -> Tensor:
        rows, columns = self._size
        return like.new_zeros(like.shape[0], rows, like.shape[2], columns, like.shape[4])


class Passes:
    """A causal language model with live rows.

    Raises:
        UsageError: The model's layers cannot be decoded row by row (recurrent or convolution layers),
            decoding does not agree with a plain forward pass, or the numbers of a row depend on the longest
            row beside it.
    """

    def __init__(self, model: Any, *, tell_experts: bool = False, vision: Vision | None = None) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        cuda = model.device.type == "cuda"
        self.rows = Rows(together=TOGETHER, step=STEP) if cuda else Rows()
        self._windows = attention_windows(self.config)
        inner = base_model(model)
        self._experts = ExpertRecorder(inner) if tell_experts else None
        self._routed: tuple[int, torch.Size] | None = None
        """Index of the part with the choices of routers, and the numbers of layers and choices."""
        if isinstance(inner, PreTrainedModel):
            use_grouped_attention(inner)
        fix_frequencies(inner)
        # cuDNN's attention, which torch 2.11 prefers on Hopper, plans for each new width, and rows grow by a
        # token in each pass. On the CPU this changes nothing.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        self.sight = None if vision is None else Sight(vision, inner)
        """What the rows see; None for a model that sees nothing."""
        check(self)

    def prefill(self, first: int, new: Sequence[Sequence[int]], most: int) -> Tensor:
        """Do what `run` does; a single row may have any number of tokens, of which a pass takes `most`."""
        if len(new) > 1:
            return self.run(first, new)
        if self.sight is not None:
            chunks = self.sight.chunks(new[0], most)
        else:
            chunks = [new[0][at : at + most] for at in range(0, len(new[0]), most)]
        return [self.run(first, [chunk]) for chunk in chunks][-1]

    @torch.no_grad()
    def run(self, first: int, new: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to the rows from `first` on; return the logits after the last, `[B, V]`, in float32.

        Args:
            first: the first row that gets tokens.
            new: the new tokens of each row, at least one. Tokens of images are those of a single row.
        """
        rows, device = self.rows, self.model.device
        columns_BT = rows.plan(first, [len(tokens) for tokens in new], device).clamp_(min=0)
        seen = masks(columns_BT, rows.width, self._windows, self.model.dtype)
        if self.sight is not None and min(new[0]) < 0:
            given = self.sight.look(new[0], columns_BT, rows.shifts[first], seen, self._windows)
            rows.shifts[first] += self.sight.shift(new[0])
        else:
            ids = [[0] * (columns_BT.shape[1] - len(tokens)) + list(tokens) for tokens in new]
            shifts = rows.shifts[first : first + len(new)]
            places = columns_BT if self.sight is None else self.sight.positions(columns_BT, shifts)
            given = {"input_ids": torch.tensor(ids, device=device), "position_ids": places}
        if self.model.training:
            self.model.eval()
        with nullcontext() if self._experts is None else self._experts.recording():
            output = self.model(
                **given,
                attention_mask=seen.get("all", seen),
                past_key_values=rows,
                use_cache=True,
                logits_to_keep=1,
            )
        if self._experts is not None:
            chosen = self._experts.taken(*columns_BT.shape)
            at = rows.num_parts if self._routed is None else self._routed[0]
            self._routed = at, chosen.shape[3:]
            rows.write(at, chosen.flatten(3))
        for row, tokens in enumerate(new, start=first):
            rows.lengths[row] += len(tokens)
        return output.logits[:, -1].float()

    def routed_experts(self, row: int) -> RoutedExperts | None:
        """Return the experts that the tokens of a row were sent to; None if they are not recorded."""
        if self._experts is None or self._routed is None:
            return None
        at, shape = self._routed
        return self._experts.told(self.rows.part(at)[row, 0, : self.rows.lengths[row]].unflatten(-1, shape))


def check(passes: Passes) -> None:
    """Check on a short sequence that prefill and decoding agree with one plain forward pass.

    Raises:
        UsageError: They do not, or the model takes no rows whose keys and values are kept for it.
    """
    model, windows = passes.model, attention_windows(passes.config).values()
    longest = max((one for one in windows if one is not None and one <= LONGEST_CHECKED_WINDOW), default=0)
    ids = [(7 + 31 * index) % (passes.config.vocab_size - 1) for index in range(CHECK_TOKENS + longest)]
    model.eval()
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    expected = plain[-CHECK_DECODED - 1 :].float().log_softmax(-1)
    try:
        error = float((_replayed(passes, ids) - expected).abs().mean() / expected.std())
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as refusal:
        problem = (
            f"{type(model).__name__} does not take rows whose keys and values are kept for it "
            f"({type(refusal).__name__}: {first_line_of(refusal)})"
        )
    else:
        limit = 1e-3 if model.dtype == torch.float32 else 0.1
        if error < limit:
            return
        problem = (
            f"decoding {type(model).__name__} with kept keys and values does not agree with a plain forward "
            f"pass (relative difference {error:.3g}, limit {limit})"
        )
    raise UsageError(
        f"{problem}: this engine does not support its attention", remedy="use vllm: or a vLLM server"
    )


def _replayed(passes: Passes, ids: list[int]) -> Tensor:
    """Return the last log-probabilities of a sequence that is kept, padded beside another, and decoded."""
    rows, decoded = passes.rows, len(ids) - CHECK_DECODED
    kept = decoded // 2
    rows.add((), 0, 0)
    passes.run(0, [ids[:1]])  # shows which parts there are
    rows.clear()
    rows.add((), 0, 0)
    passes.run(0, [ids[: kept + 1]])
    parts = rows.view(0, kept)
    rows.clear()
    rows.add(parts, kept, 0)
    rows.add((), 0, 0)
    logits = [passes.run(0, [ids[kept:decoded], ids[:3]])[:1]]
    logits += [passes.run(0, [[token], [1]])[:1] for token in ids[decoded:]]
    rows.clear()
    return torch.cat(logits).log_softmax(-1)
