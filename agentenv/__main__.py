"""`python -m agentenv`: the command line without its script, as `torchrun -m` needs it."""

from agentenv.cli import main

if __name__ == "__main__":
    main()
