#!/bin/bash
if [ "$(python3 /app/add.py 2 3)" = 5 ] && [ "$(python3 /app/add.py -4 40)" = 36 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
