#!/bin/bash
mkdir -p /app/box && touch /app/box/lid
