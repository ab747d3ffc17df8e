"""``ringtrain doctor``: would training work here, and if not, what helps?

``probes.py`` gathers facts, ``judging.py`` and ``ranks.py`` make findings of them by pure functions, ``table.py`` shows
them, and ``ringtrain/commands/doctor.py`` does these in turn, with the other ranks if there are any.
"""
