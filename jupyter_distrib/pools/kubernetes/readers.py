"""Reads the options of the pool: names and quantities as Kubernetes writes them. Pure."""

from __future__ import annotations

import re
import shlex

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.options import MOST_CHARS, not_an_option, shown

MOST, MOST_BYTES = 1e9, 1e18
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_RESOURCE = re.compile(rf"{_SUBDOMAIN.pattern}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")


def name(option: str, text: str) -> str:
    """Read the name of a namespace, queue or service account."""
    if len(text) > 253 or not _SUBDOMAIN.fullmatch(text):
        raise OptionsError(f"{option} must be a name of small letters, digits, - and dots; got {shown(text)}")
    return text


def context(option: str, text: str) -> str:
    """Read the name of a context, in which almost any character may be."""
    if not_an_option(option, text) != text.strip():
        raise OptionsError(f"{option} must be the name of a context of kubectl; got {shown(text)}")
    return text


def image(option: str, text: str) -> str:
    """Read the name of an image; whether it exists, the cluster will say."""
    if len(text) > MOST_CHARS or not re.fullmatch(r"[\w][\w.:/@+-]*", text, re.ASCII):
        raise OptionsError(f"{option} must be an image such as pytorch/pytorch:2.9.0; got {shown(text)}")
    return text


def resource(option: str, text: str) -> str:
    """Read the name of a resource."""
    if not _RESOURCE.fullmatch(text):
        raise OptionsError(f"{option} must be the name of a resource, such as nvidia.com/gpu; got {shown(text)}")
    return text


def cores(option: str, text: str) -> str:
    """Read a number of cores: `4`, `0.5` or `500m`."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match["unit"] not in (None, "m") or not 0 < float(match["number"]) <= MOST:
        raise OptionsError(f"{option} must be a number of cores such as 4 or 500m; got {shown(text)}")
    return text


def size(option: str, text: str) -> str:
    """Read a size: `64Gi` or `500M`."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match["unit"] == "m" or not 0 < float(match["number"]) <= MOST_BYTES:
        raise OptionsError(f"{option} must be a size such as 64Gi or 500M; got {shown(text)}")
    if match["unit"] is None and float(match["number"]) < 1 << 20:
        raise OptionsError(f"{option} = {text} is {text} bytes: write {text}Gi or {text}Mi")
    return text


def command(option: str, text: str) -> str:
    """Read a command line."""
    not_an_option(option, text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise OptionsError(
            f"{option} must be a command such as 'microk8s kubectl'; {shown(text)} is not a command ({error})"
        ) from None
    if not words:
        raise OptionsError(f"{option} must be a command such as 'microk8s kubectl'; got {shown(text)}")
    return text
