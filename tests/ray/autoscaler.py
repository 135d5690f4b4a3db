"""Becomes the head of a cluster that scales itself: no CPUs of its own, up to four nodes of four CPUs when they are asked for.

Ray's own class for this (`ray.cluster_utils.AutoscalingCluster`) ends every Ray of the machine and lacks a file in Ray's
wheels; this has the same provider of nodes that are processes, for which the head must be at Ray's own port. In a
namespace of its own, all of it ends with this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NODE = {
    "resources": {"CPU": 4, "object_store_memory": 100_000_000},
    "node_config": {},
    "min_workers": 0,
    "max_workers": 4,
}
HEAD = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
CONFIG = {
    "cluster_name": "fake",
    "max_workers": 4,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {"node": NODE, "head": HEAD},
    "head_node_type": "head",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 5,
    "file_mounts_sync_continuously": False,
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{f"{name}_commands": [] for name in COMMANDS},
}
OPTIONS = ("--head", "--block", "--port=6379", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats")


def main(config: Path) -> None:
    config.write_text(json.dumps(CONFIG))
    ray = str(Path(sys.executable).parent / "ray")
    os.environ |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    own = ("unshare", "-rpf", "--mount-proc", "--kill-child")
    memory = "--object-store-memory=100000000"
    os.execvp(own[0], (*own, ray, "start", *OPTIONS, memory, f"--autoscaling-config={config}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
