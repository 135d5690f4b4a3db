"""What crosses between kernel, coordinator, agent and worker, and how. Any process."""
