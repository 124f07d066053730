"""``python -m kvpass``."""

from kvpass.cli import main

raise SystemExit(main())
