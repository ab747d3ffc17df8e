"""What the user tells ``launch local`` by signals."""

from __future__ import annotations

import signal

from .family import FORWARDED, is_ignored
from .lines import print_line


class Requests:
    """The signals that this process has got, in order. Create it in the main thread; it unblocks them."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        """those for the ranks: they save and leave"""
        self.is_end_wanted = False
        """a second SIGINT: nobody waits for a save"""
        for number in FORWARDED:
            if not is_ignored(number):
                signal.signal(number, self._take)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def _take(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in self.signals:
            self.is_end_wanted = True
            return
        # A terminal that is closed is no reason to lose anything.
        wanted = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        again = "; Ctrl-C once more ends them at once" if number == signal.SIGINT else ""
        print_line(f"{signal.Signals(number).name}: the ranks save and leave{again}")
        self.signals.append(wanted)
