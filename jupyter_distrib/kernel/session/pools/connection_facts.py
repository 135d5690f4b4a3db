"""The properties of a pool that stay while a kernel has it. Values without state."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_distrib.pools.base import Capabilities, capabilities_of, packages_wanted
from jupyter_distrib.system.data_class import data_class


@data_class
class PoolAddress:
    """The name and the options under which a pool was reached."""

    name: str
    kind: str
    options: dict[str, str]


@data_class
class ConnectionFacts:
    """The unchanging properties of a pool that this kernel has reached."""

    pool: str
    """The name under which it was reached."""
    kind: str
    options: Mapping[str, str]
    """The options of its kind with which it was reached."""
    capabilities: Capabilities
    remote: bool
    """Whether its ranks may be on other machines."""
    elsewhere: bool
    """Whether its ranks run, or may run, under another interpreter than the kernel."""
    packages_mode: str
    """The policy for packages that its ranks lack; `off` if they are not compared, or none can be missing."""
    packages_limit_bytes: int

    @classmethod
    def of(cls, address: PoolAddress) -> ConnectionFacts:
        capabilities = capabilities_of(address.kind)
        elsewhere = capabilities.remote or bool(address.options.get("python"))
        mode, limit_bytes = packages_wanted(address.options) if elsewhere else ("off", 0)
        return cls(
            pool=address.name,
            kind=address.kind,
            options=address.options,
            capabilities=capabilities,
            remote=capabilities.remote,
            elsewhere=elsewhere,
            packages_mode=mode,
            packages_limit_bytes=limit_bytes,
        )
