"""A worker of pytest-xdist: what execnet would start by ``python -c``, as a module that the fork server knows.

A forked worker has TensorFlow and Keras already. Four that import them take seconds of all cores.
"""

import runpy
import sys
from pathlib import Path

if "tensorflow" not in sys.modules:  # comes back if there is no server, or if it refuses
    runpy.run_path(str(Path(__file__).parent / "world/forked/sitecustomize.py"))
exec(eval(sys.stdin.readline()))  # execnet's own first line
