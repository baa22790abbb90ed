"""Measure whether sending only what a step changed in the weights would be smaller than the weights.

    python benchmarks/delta.py [--quick] [--json PATH]

Weights are drawn like those of a language model (normal, standard deviation 0.02), and a step adds a normal
number of the size of the learning rate to each, as Adam does. The bits of the weights before and after are
combined by exclusive or, their bytes sorted by significance, and compressed with zstd at level 1.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

RATES = (1e-6, 1e-5, 1e-4)


def bits_of(weights, kind):
    """Return the bits of the weights as integers; bfloat16 is rounded to the nearest even number."""
    bits = weights.view(np.uint32)
    if kind == "float32":
        return bits
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measure(kind, rate, size):
    """Return the share of weights that a step changes, and what packing the change leaves and costs."""
    random = np.random.default_rng(0)
    weights = random.standard_normal(size, dtype=np.float32) * np.float32(0.02)
    before = bits_of(weights, kind)
    after = bits_of(weights + np.float32(rate) * random.standard_normal(size, dtype=np.float32), kind)
    began = time.process_time()
    changed = before ^ after
    planes = np.ascontiguousarray(changed.view(np.uint8).reshape(size, changed.itemsize).T)
    packed = pa.Codec("zstd", 1).compress(planes.tobytes(), asbytes=True)
    seconds = time.process_time() - began
    return {
        "weights": kind,
        "learning_rate": rate,
        "changed": round(float(np.count_nonzero(changed)) / size, 3),
        "bytes_left": round(len(packed) / before.nbytes, 3),
        "cpu_s_a_gb": round(seconds / before.nbytes * 1e9, 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = 1_000_000 if given.quick else 20_000_000
    rows = [measure(kind, rate, size) for kind in ("bfloat16", "float32") for rate in RATES]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
