"""`python -m agentenv.cli`: the command line without its script."""

from agentenv.cli import main

main()
