"""Read DeepSpeed's configuration as plain data, from a dict, JSON or YAML."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError

Config = dict[str, Any]


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Read a configuration as plain data; ConfigurationError if it is malformed, or holds what JSON cannot express."""
    if isinstance(source, Mapping):
        return copy_of(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigurationError(
            f"deepspeedConfig must be a dict or the path of a JSON or YAML file, not {type(source).__name__} {source!r}"
        )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"deepspeedConfig {str(source)!r} cannot be read on the driver: {reason}") from error
    try:
        loaded = _load_yaml(text) if path.suffix in (".yaml", ".yml") else _load_json(text)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"deepspeedConfig {str(source)!r} is malformed: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigurationError(
            f"deepspeedConfig {str(source)!r} must contain a mapping, not {type(loaded).__name__} {loaded!r}"
        )
    return copy_of(loaded)


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        try:
            import hjson  # DeepSpeed's own reader: JSON with comments
        except ImportError:
            raise error from None
        if not text.lstrip().startswith(("{", "/", "#")):  # hjson reads nearly any text as a mapping
            raise
        try:
            return hjson.loads(text, object_pairs_hook=_unique)
        except hjson.HjsonDecodeError:
            raise error from None


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"a YAML file as deepspeedConfig needs PyYAML on the driver ({error}): pip install pyyaml, or use JSON"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no type hints
        """Refuses duplicate names, and reads 1e-4 as a number, which is text in YAML 1.1, as it has no dot."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)  # as written: merging adds names to it later
            _unique([(str(key.value), None) for key, _ in node.value if not key.tag.endswith(":merge")])
            return node

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    return yaml.load(text, Loader)  # noqa: S506  # a SafeLoader


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ConfigurationError(f"deepspeedConfig gives {name!r} twice")
        unique[name] = value
    return unique


def copy_of(config: Mapping[str, Any]) -> Config:
    """Return a copy in which the older name ``bfloat16`` is ``bf16``, unless both are there."""
    copied: Config = plain(config, "")
    if "bfloat16" in copied and "bf16" not in copied:  # an older name that DeepSpeed still reads
        copied["bf16"] = copied.pop("bfloat16")
    return copied


def plain(value: Any, path: str) -> Any:
    """Return a copy of a value, with lists for tuples; ConfigurationError if JSON cannot express it."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ConfigurationError(
                    f"deepspeedConfig: the key {name!r}{f' in {path}' if path else ''} must be a string, "
                    f"not {type(name).__name__}"
                )
        return {name: plain(inner, f"{path}.{name}" if path else name) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"deepspeedConfig: {path} is {value}, which JSON cannot express: use a large number")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigurationError(
        f"deepspeedConfig: {path} is a {type(value).__module__}.{type(value).__qualname__}; "
        "only numbers, strings, booleans, lists and dicts can be shipped"
    )
