#!/bin/bash
tar -czf /app/site.tar.gz -C /app --exclude='*.tmp' site
