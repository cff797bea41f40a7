"""`python -m kvota`: the same as the command."""

from kvota.cli import main

if __name__ == "__main__":
    main()
