#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/answer.txt)" = "$(cat /tests/answer)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
