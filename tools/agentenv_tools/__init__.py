"""The tools that ship with agentenv."""
