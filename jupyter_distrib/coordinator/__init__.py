"""The process beside the kernel that holds crews on other machines together: no torch, no user code."""
