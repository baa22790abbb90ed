#!/bin/bash
if cd /app/repo && git config --global --add safe.directory /app/repo && [ "$(git show HEAD:data.txt)" = 42 ] && [ "$(git rev-list --count HEAD)" = 3 ] && [ -z "$(git status --porcelain)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
