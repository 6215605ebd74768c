"""Losses and metrics of the tasks; the file of a task's options imports them when it is built."""
