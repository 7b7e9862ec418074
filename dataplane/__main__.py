"""`python -m dataplane` is `tq`."""

from dataplane.cli import main

raise SystemExit(main())
