"""`python -m modulm` is the command `modulm`."""

from modulm.cli.main import main

if __name__ == "__main__":
    main()
