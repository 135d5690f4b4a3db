"""Ranks in pods of a Job that kubectl creates for them."""

import shlex
import shutil
from collections.abc import Mapping


def usable(options: Mapping[str, str]) -> bool:
    """Return whether a pool with these options can be reached at all."""
    return bool({"image", "template"} & options.keys()) and shutil.which(_program(options)) is not None


def _program(options: Mapping[str, str]) -> str:
    return shlex.split(options.get("kubectl", "kubectl"))[0]
