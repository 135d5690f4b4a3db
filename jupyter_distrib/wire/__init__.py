"""The traffic between kernel, coordinator, agent and worker: its messages and its transport. Any process."""
