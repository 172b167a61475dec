"""``python -m nvfp4``: the command line where the package is not installed."""

from .cli.main import main

if __name__ == "__main__":
    main()
