"""``python -m launch``."""

import sys

from launch.cli import main
from ringtrain.runtime.streams import keep_streams

keep_streams()
sys.exit(main(sys.argv[1:]))
