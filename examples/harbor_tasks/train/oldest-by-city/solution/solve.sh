#!/bin/bash
awk -F, 'NR>1 && $3>m[$2] {m[$2]=$3} END {for (c in m) print c, m[c]}' /app/people.csv | sort > /app/oldest.txt
