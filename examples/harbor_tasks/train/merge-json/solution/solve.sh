#!/bin/bash
python3 - <<'END'
import json, pathlib
merged = {}
for path in sorted(pathlib.Path("/app/parts").glob("*.json")):
    merged |= json.loads(path.read_text())
pathlib.Path("/app/all.json").write_text(json.dumps(merged))
END
