"""`python -m autoshard`."""

from autoshard.cli.commands import main

raise SystemExit(main())
