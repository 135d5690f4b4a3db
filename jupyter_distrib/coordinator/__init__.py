"""The process beside the kernel that manages worker groups on other machines: no torch, no user code."""
