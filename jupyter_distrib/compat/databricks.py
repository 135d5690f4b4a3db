"""The stand-in for the namespace `databricks`, which has `databricks.air` only. Kernel side."""

from __future__ import annotations

__all__: list[str] = []
