"""The types of the keywords of `@distributed` and `run_script`. Standard library only, no state.

Made from the options: `python -m tests.generated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypedDict


class OptionKeywords(TypedDict, total=False):
    """The options of `%%distributed`, as keywords; docs/options.md says what each means."""

    gpus: int | str | None
    ranks: int | str | None
    gpu_type: str | Enum | None
    numa_binding: str | None
    strategy: str | None
    pool: str | None
    on: int | str | Sequence[int] | None
    timeout_s: float | None
    wait_s: float | None
    hang_timeout_s: float | None
    max_restarts: int | None
    min_ranks: int | None
    grow_after_s: float | None
    restart_on: str | None
    check: bool | None
    backend_fallback: bool | None
    debug: bool | None
    profile: int | bool | None
    detach: bool | None
    fresh: bool | None
    warm: bool | None
    env: Mapping[str, str] | None
    max_capture: int | str | None
    cache: int | str | None
    track: str | Sequence[str] | None
    dry_run: str | bool | None
    batch: str | None
    shard_eval: bool | None
    no_guess: str | None
    zero: int | str | None
    config: str | None
    fsdp_unit: str | None
    precision: str | None
    cpu_offload: bool | None
    own_scope: bool | None
    mesh: str | None
    python: str | None
    idle: float | None
    environment: str | None
    environment_limit: int | str | None
    hosts: str | Sequence[str] | None
    start: str | None
    nodes: int | str | None
    interface: str | None
    reconnect: float | None
    copy_files: bool | None
    up: str | None
    down: str | None
    status: str | None
    hosts_from: str | None
    down_after: str | None
    at_most: str | None
    up_within: str | None
    price: str | None
    step_through: bool | None
    image: str | None
    template: str | None
    namespace: str | None
    context: str | None
    gpus_per_pod: int | None
    gpu_resource: str | None
    cpu: str | None
    memory: str | None
    shm: str | None
    queue: str | None
    service_account: str | None
    time: str | None
    kubectl: str | None
    address: str | None
    cpus_per_rank: float | None
    insecure: bool | None
    runtime_env: str | None
    partition: str | None
    account: str | None
    qos: str | None
    gres: str | None
    constraint: str | None
    salloc: str | None
    master: str | None
    executors: int | None
    conf: str | None
    ssh: str | None
