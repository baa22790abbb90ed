#!/bin/bash
chmod -R u=rwX,go= /app/secrets
