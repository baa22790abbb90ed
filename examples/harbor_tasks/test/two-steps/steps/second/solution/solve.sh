#!/bin/bash
mv /app/box /app/chest
