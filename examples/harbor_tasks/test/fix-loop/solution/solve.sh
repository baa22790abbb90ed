#!/bin/bash
sed -i 's/^        number += 1/    number += 1/' /app/primes.py
