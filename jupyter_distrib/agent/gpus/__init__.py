"""The GPUs of this node: which there are, which suit, and who leases them."""
