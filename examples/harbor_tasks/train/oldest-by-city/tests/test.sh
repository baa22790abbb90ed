#!/bin/bash
if diff -bB /tests/expected /app/oldest.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
