"""``kfac-bench try``: does K-FAC help on the user's own problem?

:mod:`.study` runs the trials, :mod:`.budget` shares out the time, :mod:`.spaces` holds what is
tried, :mod:`.verdict` writes the answer, and :mod:`.paste` the lines for the user's script.
"""
