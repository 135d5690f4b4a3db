"""The process beside the kernel that holds together worker groups on other machines: no torch, no user code."""
