"""Seconds of a step on ranks that are not there: a plan, timed on a model of the hardware.

:mod:`.network` and :mod:`.rates` say what one message and one piece of work take, :mod:`.step`
runs the plan with them, :mod:`.sweep` does so over world sizes and strategies. No torch in these.
"""
