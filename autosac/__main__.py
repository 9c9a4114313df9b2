"""``python -m autosac`` is the ``autosac`` command."""

from autosac.cli.commands import main

main()
