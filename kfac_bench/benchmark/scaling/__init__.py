"""Measured scaling: the same training on several numbers of ranks, and where its steps' time goes.

:mod:`.measured` reads event files. :mod:`.scaling_report` has the tables and the figure.
:mod:`.scaling_options` starts the runs.
"""
