"""`python -m nanoapc` is `nanoapc`."""

import sys

from nanoapc.cli import main

sys.exit(main())
