#!/bin/bash
if printf 'pear\nfig\nplum\nkiwi\nPear\n' | cmp -s - /app/words.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
