"""A Ray cluster of two nodes on loopback, until standard input ends: `python cluster.py CLIENT_PORT CPUS`.

Prints the head's address, then what a line of input asks for: `lose` kills the second node's raylet, `add` starts another.
127.0.0.1 will not do, since Ray replaces it by an address of the network.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(client_port: int, cpus: int) -> None:
    common = {"num_cpus": cpus, "object_store_memory": 150_000_000}
    head = {**common, "node_ip_address": "127.0.0.2", "include_dashboard": False, "ray_client_server_port": client_port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**common, node_ip_address="127.0.0.3")
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "lose\n":
            cluster.remove_node(second, allow_graceful=False)
        elif line == "add\n":
            second = cluster.add_node(**common, node_ip_address="127.0.0.3")
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
