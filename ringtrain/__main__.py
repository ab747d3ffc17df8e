"""``python -m ringtrain``."""

import sys

from ringtrain.cli import main

sys.exit(main())
