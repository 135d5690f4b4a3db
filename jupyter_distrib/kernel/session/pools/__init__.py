"""The pools that this notebook has reached, and the worker groups on them."""
