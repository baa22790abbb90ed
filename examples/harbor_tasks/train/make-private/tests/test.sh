#!/bin/bash
if [ -z "$(find /app/secrets -perm /077)" ] && [ "$(cat /app/secrets/more/b.key)" = 2 ] && [ "$(stat -c %a /app/secrets/more)" = 700 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
