"""The files of ``--config-dir``, which may come from somebody else, as Hydra reads them.

Hydra finds the files itself: a list of defaults can name any file of the folder. So the check for
aliases is where Hydra reads a file.
"""

from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult

from kfac_bench import plain_yaml
from kfac_bench.errors import UsageError


class ReceivedFiles(FileConfigSource):
    """A folder whose YAML files must have no aliases, of which OmegaConf would make copies."""

    @staticmethod
    def scheme() -> str:
        """Return the prefix of such folders in Hydra's search path."""
        return "received"

    def load_config(self, config_path: str) -> ConfigResult:
        """Check a file and read it; raise :class:`UsageError` if the file has aliases."""
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            plain_yaml.refuse_aliases(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            pass  # Hydra itself reports a file that is missing or no YAML.
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
        return super().load_config(config_path)


def search_path(folder: Path) -> str:
    """Return the folder as an entry of Hydra's search path."""
    SourcesRegistry.instance().register(ReceivedFiles)
    return f"{ReceivedFiles.scheme()}://{folder.resolve()}"
