"""Tools that ship with agentenv."""
