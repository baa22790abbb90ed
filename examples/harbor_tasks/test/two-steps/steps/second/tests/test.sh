#!/bin/bash
if [ -f /app/chest/lid ] && [ ! -e /app/box ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
