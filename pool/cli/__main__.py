"""``python -m pool.cli`` is the command ``emberpool``."""

from pool.cli.main import main

main()
