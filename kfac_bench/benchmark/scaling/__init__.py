"""Measured scaling: the same training on several numbers of ranks, and where its steps' time goes.

:mod:`.measured` reads event files, :mod:`.tables` and :mod:`.figure` show them, :mod:`.cells` and
:mod:`.command` make the runs.
"""

from kfac_bench.benchmark.scaling.scaling_tables import scaling_table as scaling_table
from kfac_bench.benchmark.scaling.scaling_tables import stage_table as stage_table
from kfac_bench.benchmark.scaling.scaling_tables import tables as tables
