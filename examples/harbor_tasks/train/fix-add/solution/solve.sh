#!/bin/bash
sed -i 's/sys.argv\[1\] + sys.argv\[2\]/int(sys.argv[1]) + int(sys.argv[2])/' /app/add.py
