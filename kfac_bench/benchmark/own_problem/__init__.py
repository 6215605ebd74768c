"""``kfac-bench try``: does K-FAC help on the user's own problem?

:mod:`.study_input` holds what is tried, :mod:`.study_plan` shares out the time, :mod:`.study` runs
the trials, and :mod:`.leaderboard` shows them. :mod:`.try_result` compares the winners on fresh
seeds, :mod:`.verdict` puts this in words, and :mod:`.answer` writes the verdict, the page and the
lines for the user's script.
"""
