"""With `--json` one JSON object is alone on standard output, whatever an environment prints."""

import json
import subprocess
import sys

import pytest

NOISY = """
import os, subprocess, sys
import agentenv as ae

print("printed when imported")

class Noisy(ae.ToolEnv):
    tasks = [{"x": 1}]

    def start(self, x: int):
        print("printed by start")
        os.write(1, b"written to the descriptor\\n")
        subprocess.run([sys.executable, "-c", "print('printed by a program')"], check=True)
        return "Hello"

    def reward(self, answer):
        return 1.0

ae.register("noisy/Noisy-v0", Noisy)
"""


@pytest.mark.parametrize("verb", [("eval", "-m", "scripted:Hm."), ("check", "-n", "1")])
def test_what_an_environment_prints_goes_to_standard_error(tmp_path, verb):
    (tmp_path / "noisy.py").write_text(NOISY)
    command = [sys.executable, "-m", "agentenv", verb[0], "noisy.py", *verb[1:], "--json"]

    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert isinstance(json.loads(said.stdout), dict)
    for words in ("printed when imported", "printed by start", "written to the desc", "printed by a program"):
        assert words in said.stderr
