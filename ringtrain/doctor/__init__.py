"""``ringtrain doctor``: checks if training would work here.

``probes.py`` gathers facts, ``judging.py`` and ``ranks.py`` turn them into findings, ``table.py`` prints them,
``ringtrain/commands/doctor.py`` runs it all.
"""
