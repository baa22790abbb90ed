#!/bin/bash
mkdir /check && tar -xzf /app/site.tar.gz -C /check
if [ "$(cd /check && find . -type f | sort | xargs)" = "./site/css/a.css ./site/index.html" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
