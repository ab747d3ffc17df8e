"""``python -m launch``."""

import sys

from ringtrain.runtime.stdio import keep_streams

from .cli import main

keep_streams()
sys.exit(main(sys.argv[1:]))
