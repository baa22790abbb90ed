#!/bin/bash
cd /app/repo && git revert --no-edit HEAD
