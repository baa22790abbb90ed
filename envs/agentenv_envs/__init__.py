"""The environments that ship with agentenv; each is registered through an entry point."""
