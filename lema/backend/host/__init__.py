"""The machine around a process: the processors that it may keep busy."""
