"""`python -m layershuffle`: the command line without an installed script."""

from layershuffle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
