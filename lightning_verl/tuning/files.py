"""From a config to the YAML file that gives it."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from lightning_verl.config import TrainConfig


def config_values(config: TrainConfig) -> dict[str, Any]:
    """What a YAML file of a config holds: all that differs from the defaults. Reading it gives an equal config."""
    return _differing(config)


def write_config(path: Path, config: TrainConfig, comment: str = "") -> None:
    """Write a config as a file that ``lightning-verl train`` reads.

    Args:
        path: The file.
        config: The config.
        comment: One line for its head; none where it is empty.
    """
    import yaml

    head = f"# {comment}\n" if comment else ""
    path.write_text(head + yaml.safe_dump(config_values(config), sort_keys=False, allow_unicode=True))


def _differing(part: Any) -> dict[str, Any]:
    values = {}
    for entry in fields(part):
        value = getattr(part, entry.name)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if value != default:
            values[entry.name] = _differing(value) if is_dataclass(value) else _plain(value)
    return values


def _plain(value: Any) -> Any:
    """YAML knows lists, dictionaries and single values."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value
