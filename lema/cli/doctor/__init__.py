"""`lema doctor`: whether this machine is ready (versions, limits, devices, disk), and how to mend what is not."""
