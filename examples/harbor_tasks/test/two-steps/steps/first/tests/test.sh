#!/bin/bash
if [ -f /app/box/lid ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
