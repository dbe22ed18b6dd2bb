"""Weights on their way: the order of visits, bytes into host buffers, leases over device slots, what stays resident."""
