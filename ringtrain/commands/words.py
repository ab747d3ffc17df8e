"""YAML values of command line words, separate so that the parser works without PyYAML."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Plain YAML; 1e-3 and -.5 are numbers, dates are strings, and aliases, anchors and tags are refused."""

    def fetch_alias(self) -> None:
        raise yaml.YAMLError

    fetch_anchor = fetch_tag = fetch_alias


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def read_word(text: str) -> Any:
    """Raise ValueError for invalid YAML."""
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError):
        raise ValueError from None
