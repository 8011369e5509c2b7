"""`python -m autoshard`."""

from autoshard.cli import main

raise SystemExit(main())
