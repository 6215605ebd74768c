"""Measured scaling: the same training on several numbers of ranks, and where its steps' time goes.

:mod:`.measured` reads event files. :mod:`.scaling_report` has the tables and the figure.
:mod:`.scaling_options` starts the runs.
"""

from kfac_bench.benchmark.scaling.scaling_report import scaling_table as scaling_table
from kfac_bench.benchmark.scaling.scaling_report import stage_table as stage_table
from kfac_bench.benchmark.scaling.scaling_report import tables as tables
