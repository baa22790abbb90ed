#!/bin/bash
# Half of the mark for lists of odd length, which work already and must go on to.
python3 - <<'END'
import json, sys
sys.path.insert(0, "/app")
from stats import median
odd = median([3, 1, 2]) == 2 and median([5]) == 5
even = odd and median([4, 1, 3, 2]) == 2.5 and median([1, 2]) == 1.5
json.dump({"reward": 1.0 if even else 0.1 if odd else 0.0, "odd": float(odd), "even": float(even)}, open("/logs/verifier/reward.json", "w"))
END
