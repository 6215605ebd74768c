"""The learning-rate schedules."""
