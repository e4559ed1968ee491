"""YAML files as data: nothing is executed, a dataclass says what may stand there, errors have file and line.

Only mappings, lists and scalars: no tags, no anchors, no second document. A file cannot run code, and cannot
grow when it is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import stat
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mok_megatron.errors import MokConfigError

MAX_BYTES = 1 << 20


class ConfigFileError(MokConfigError):
    """A configuration file that cannot be read as what it should be. The message has file, line and key."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `known`, else the sorted list of what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(repr(name) for name in near) + "?"
    return "; known: " + ", ".join(names)


@dataclass(frozen=True)
class Where:
    """A place in a file, for messages: the path, the line (from 1) and the dotted key."""

    path: Path
    line: int
    key: str = ""

    def error(self, text: str) -> ConfigFileError:
        key = f"{self.key}: " if self.key else ""
        return ConfigFileError(f"{self.path}, line {self.line}: {key}{text}")

    def inner(self, node: yaml.Node, key: str) -> Where:
        return Where(self.path, node.start_mark.line + 1, f"{self.key}.{key}" if self.key else key)


def load_typed[T](path: Path, cls: type[T]) -> T:
    """Read the YAML file `path` as an instance of the dataclass `cls`.

    Fields without default are required, keys that are no field are refused with the nearest that is, and
    values must have the field's type (an int serves for a float). Supported types: bool, int, float, str,
    X | None, list[X], dict[str, X] and dataclasses of these. A method `check() -> Iterable[(key, problem)]`
    of a dataclass is called after it is built; its first problem is raised with the line of that key.

    Raises:
        ConfigFileError: with file, line and key.
    """
    node = _compose(path)
    return _build(cls, node, Where(path, node.start_mark.line + 1))


def _compose(path: Path) -> yaml.Node:
    start = Where(path, 1)
    try:
        # A pipe may have no end, and without a writer even opening it would wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise start.error("is not a regular file")
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise start.error(f"larger than {MAX_BYTES} bytes; this is not a configuration file")
        text = content.decode("utf-8")
    except ConfigFileError:  # is a ValueError too
        raise
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path}: is not UTF-8 text: {error}") from error
    except ValueError as error:  # a path with a null character
        raise ConfigFileError(f"{str(path)!r}: cannot be read: {error}") from error
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1 if event.start_mark else 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise Where(path, line).error("anchors and aliases are not accepted; write the value out")
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise Where(path, line).error(f"tags such as {tag!r} are not accepted")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except ConfigFileError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Where(path, line).error(f"does not parse as YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise start.error(f"does not parse as YAML: {error}") from error
    if node is None:
        raise start.error("is empty")
    return node


def _build(expected: Any, node: yaml.Node, where: Where) -> Any:
    origin = typing.get_origin(expected)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(expected) if option is not type(None)]
        if _is_null(node):
            return None
        return _build(options[0], node, where) if len(options) == 1 else _scalar_of(options, node, where)
    if dataclasses.is_dataclass(expected):
        return _build_dataclass(expected, node, where)
    if origin is dict:
        value_type = typing.get_args(expected)[1]
        return {key: _build(value_type, value, at) for key, (value, at) in _entries(node, where).items()}
    if origin is list:
        if not isinstance(node, yaml.SequenceNode):
            raise where.error(f"needs a list, found {_describe(node)}")
        (item,) = typing.get_args(expected)
        return [_build(item, child, where.inner(child, str(i))) for i, child in enumerate(node.value)]
    return _scalar_of([expected], node, where)


def _build_dataclass(cls: Any, node: yaml.Node, where: Where) -> Any:
    entries = _entries(node, where)
    fields = {entry.name: entry for entry in dataclasses.fields(cls) if entry.init}
    hints = typing.get_type_hints(cls)
    for key, (_, at) in entries.items():
        if key not in fields:
            raise at.error(f"unknown key {key!r}{suggestion(key, fields)}")
    values = {key: _build(hints[key], value, at) for key, (value, at) in entries.items()}
    for name, entry in fields.items():
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise where.error(f"lacks the key {name!r}")
    built = cls(**values)
    check = getattr(built, "check", None)
    for key, problem in check() if check else ():
        at = entries[key][1] if key in entries else where.inner(node, key)
        raise at.error(problem)
    return built


def _entries(node: yaml.Node, where: Where) -> dict[str, tuple[yaml.Node, Where]]:
    if not isinstance(node, yaml.MappingNode):
        raise where.error(f"needs keys with values, found {_describe(node)}")
    entries: dict[str, tuple[yaml.Node, Where]] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise where.inner(key_node, "?").error("a key must be plain text")
        key = key_node.value
        at = where.inner(key_node, key)
        if key in entries:
            raise at.error("stands twice")
        entries[key] = (value_node, at)
    return entries


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _scalar_of(options: list[Any], node: yaml.Node, where: Where) -> Any:
    """The scalar as the first of `options` that its YAML type is."""
    names = " or ".join(_TYPE_NAMES[option] for option in options)
    if not isinstance(node, yaml.ScalarNode):
        raise where.error(f"needs {names}, found {_describe(node)}")
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise where.error(f"needs {names}, found {node.value!r}") from error
    for option in options:
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e300 else math.inf
        if type(value) is option:
            if option is float and not math.isfinite(value):
                raise where.error(f"needs a finite number, found {node.value!r}")
            if option is str and _CONTROL.search(value):
                raise where.error(f"holds a control character: {value!r}")
            return value
    raise where.error(f"needs {names}, found {node.value!r}")


# Text is printed to terminals and into scripts' comments; lines may be broken.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "keys with values"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"{node.value!r}" if node.value else "nothing"
