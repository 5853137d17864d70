"""``python -m hal``: the command line where no script is installed."""

from hal.cli import main

main()
