#!/bin/bash
if [ "$(timeout 10 python3 /app/primes.py 20)" = "2 3 5 7 11 13 17 19" ] && [ "$(timeout 10 python3 /app/primes.py 3)" = "2 3" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
