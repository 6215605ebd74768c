"""The learning-rate schedules, one file for each."""
