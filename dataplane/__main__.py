"""Entry point of `python -m dataplane`, which is the same as `tq`."""

from dataplane.cli import main

raise SystemExit(main())
