#!/bin/bash
if [ "$(/app/slug "Hello,  World!")" = hello-world ] && [ "$(/app/slug "--A1 b--")" = a1-b ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
