"""The parts that the agent and the coordinator share: processes that serve several kernels and outlive them."""
