#!/bin/bash
cat > /app/stats.py <<'END'
def median(values):
    """Return the middle of a list of numbers."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
END
