"""What is said where a backend is missing."""

import sys
from unittest import mock

import pytest

from kfac_bench import distributed
from kfac_bench.distributed.horovod import HorovodConfig
from kfac_bench.errors import UsageError


def test_without_horovod_the_error_says_how_to_install_it():
    missing = {"horovod": None, "horovod.torch": None}
    with (
        mock.patch.dict(sys.modules, missing),
        pytest.raises(UsageError, match="not installed here; run make install-horovod"),
        distributed.join(HorovodConfig("horovod")),
    ):
        pass
