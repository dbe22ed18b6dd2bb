"""`lema doctor`: whether this machine is ready (versions, limits, devices, disk), and how to fix what is not."""
