"""A Ray cluster on loopback, until standard input ends: `python cluster.py CLIENT_PORT CPUS [NODES]`, two nodes unless said.

Prints the head's address, then what a line of input asks for: `lose` kills the last node's raylet, `add` starts another
node, `add gpus` one with two GPUs that are none, `kill` the head without a goodbye. 127.0.0.1 will not do, since Ray replaces
it by an address of the network.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(client_port: int, cpus: int, nodes: int = 2) -> None:
    common = {"num_cpus": cpus, "object_store_memory": 150_000_000}
    head = {**common, "node_ip_address": "127.0.0.2", "include_dashboard": False, "ray_client_server_port": client_port}
    if nodes == 1:
        head |= {"num_gpus": 2, "resources": {"accelerator_type:A10": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    more = [cluster.add_node(**common, node_ip_address=f"127.0.0.{number + 2}") for number in range(1, nodes)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "lose\n":
            cluster.remove_node(more.pop(), allow_graceful=False)
            cluster.wait_for_nodes(timeout=90)
        elif line in ("add\n", "add gpus\n"):
            gpus = {"num_gpus": 2} if "gpus" in line else {}
            more.append(cluster.add_node(**common, **gpus, node_ip_address=f"127.0.0.{len(more) + 3}"))
            cluster.wait_for_nodes(timeout=90)
        elif line == "kill\n":
            cluster.head_node.kill_all_processes(allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
