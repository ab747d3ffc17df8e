"""``python -m ringtrain``, of which one rank gets further flags and variables.

The first argument says which: ``{"rank": 1, "flags": [...], "variables": {...}}``.
"""

import json
import os
import sys

from ringtrain.cli import main
from ringtrain.runtime.world import read_world

if __name__ == "__main__":
    odd, *arguments = sys.argv[1:]
    settings = json.loads(odd)
    if read_world(os.environ).rank == settings["rank"]:
        os.environ.update(settings["variables"])
        arguments += settings["flags"]
    raise SystemExit(main(arguments))
