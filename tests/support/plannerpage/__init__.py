"""Makes the planner of docs/planner: the arithmetic of a plan as JavaScript, and the models' bytes
and operations as tables.
"""
