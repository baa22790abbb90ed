"""Read from the answers of a vLLM server which experts the tokens were sent to.

vLLM tells them with `--enable-return-routed-experts`: for each token of prompt and completion but the last, a
row for each layer of the model. A token whose keys and values were in the prefix cache has the experts with
which they were computed.
"""

from __future__ import annotations

import io
from base64 import b64decode
from typing import Any

from agentenv.core.routed_experts import RoutedExperts

__all__ = ["decode_experts"]


def decode_experts(text: str | None) -> RoutedExperts | None:
    """Return the experts in an answer: a .npy file in base64, with an array [tokens, layers, choices].

    Raises:
        AlignmentError, ValueError: The text is something else.
    """
    if text is None:
        return None
    import numpy as np

    ids: Any = np.load(io.BytesIO(b64decode(text, validate=True)), allow_pickle=False)
    # The format also allows wider numbers than those in which vLLM records.
    wide = str(ids.dtype) not in {"uint8", "uint16"}
    return RoutedExperts.of(ids.astype("uint16") if wide else ids)
