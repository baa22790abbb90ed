#!/bin/bash
if python3 -c 'import json; assert json.load(open("/app/all.json")) == {"a": 1, "b": 2, "c": "é", "d": None}'; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
