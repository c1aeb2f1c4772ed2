"""Lazy tables: a name from a config becomes an object, imported only on use."""

from importlib import import_module
from typing import Any

from verl.core.errors import ConfigError, nearest


def load_object(path: str, setting: str) -> Any:
    """Import `module:object`. Raises ConfigError naming `setting` when either part does not exist."""
    module_name, _, attribute = path.partition(":")
    try:
        target = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting}: cannot import module {module_name!r} of {path!r} ({error}); "
                          "is the file's folder on PYTHONPATH?") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{setting}: module {module_name!r} has no {attribute!r}; {nearest(part, dir(target))}")
        target = getattr(target, part)
    return target


class Table:
    """A table `name -> "module:object"`. From outside, `module:object` in the config needs no row."""

    def __init__(self, setting: str, rows: dict[str, str]):
        self.setting, self.rows = setting, rows

    def __getitem__(self, name: str) -> Any:
        """The object behind `name`. Raises ConfigError listing what exists when there is none."""
        if name in self.rows:
            return load_object(self.rows[name], self.setting)
        if ":" in name:
            return load_object(name, self.setting)
        raise ConfigError(f"{self.setting}: {name!r} is not known; {nearest(name, self.rows)} "
                          "(or your own, as 'module:Class')")

    def __iter__(self):
        return iter(self.rows)
