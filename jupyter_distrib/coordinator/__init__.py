"""The process beside the kernel that holds worker groups on other machines together: no torch, no user code."""
