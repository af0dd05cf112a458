"""``python -m ortplugins`` is the command line."""

from .cli import main

main(prog_name="ortplugins")
