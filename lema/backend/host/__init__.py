"""The machine and the system around a process: what it may keep busy and take, and its files, on
every system.
"""
