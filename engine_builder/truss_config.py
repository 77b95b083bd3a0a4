"""Read a deployment's config.yaml, with truss's own classes."""

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from engine_builder.files import read_file
from model.errors import ConfigError
from model.settings import Settings, read_settings

PLACEHOLDER_STORES = ("s3://preheat-releases", "s3://bucket/prefix")
"""Stores of the shipped configs and of the documentation, which nobody has."""


def _refuse_repeated_keys(root: yaml.Node | None) -> None:
    """Raise ValueError for a mapping that has a key twice, of which YAML would take the last."""
    left, seen = [root], set[int]()
    while left:
        if (node := left.pop()) is None or id(node) in seen:  # an alias is the node of its anchor
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            names = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and names[key.tag, key.value] > 1:
                    raise ValueError(f"line {key.start_mark.line + 1} has the key {key.value}, which stands twice")
                left.append(value)


def read_truss_config(path: Path) -> Any:
    """Return the TrussConfig in a file. Raises ConfigError if the file or its content cannot be read."""
    try:
        text = read_file(path)
    except OSError as error:
        reason = (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        )
        raise ConfigError(f"{path} {reason}.", "Name a deployment's config, such as config.yaml.") from error
    with warnings.catch_warnings(action="ignore"):  # warnings of truss's dependencies
        from truss.base.truss_config import TrussConfig  # type: ignore[import-untyped]

        try:
            _refuse_repeated_keys(yaml.compose(text.decode(), yaml.SafeLoader))
            entries = yaml.safe_load(text.decode())
            if not isinstance(entries, dict):
                raise ValueError("it holds no settings by name")
            config = TrussConfig.from_dict(entries)
            config.to_dict()  # raises for entries that contain themselves, by an alias of YAML
            return config
        except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise ConfigError(f"{path} is not a valid config.yaml: {reason}.", "See truss/configs.") from error


def read_preheat_settings(config: Any, variables: Mapping[str, str] = MappingProxyType({})) -> Settings:
    """Return the settings that a server of a TrussConfig would have. Raises ConfigError.

    variables: replace environment variables of the config.
    """
    section = (config.model_metadata or {}).get("preheat")
    environment = {**(config.environment_variables or {}), **variables}
    return read_settings(section if section is not None else {}, environment=environment)
