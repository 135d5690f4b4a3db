"""The worker groups of this node: their start, their repair, and the GPUs that they hold."""
