"""A missing backend is reported."""

import sys
from unittest import mock

import pytest

from kfac_bench import distributed
from kfac_bench.distributed.options import HorovodConfig
from kfac_bench.errors import UsageError


def test_a_missing_horovod_is_reported_with_the_install_command():
    missing = {"horovod": None, "horovod.torch": None}
    with (
        mock.patch.dict(sys.modules, missing),
        pytest.raises(UsageError, match="not installed here; run make install-horovod"),
        distributed.join(HorovodConfig("horovod")),
    ):
        pass
