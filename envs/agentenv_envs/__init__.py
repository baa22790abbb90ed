"""Environments that ship with agentenv; each registers itself through an entry point."""
