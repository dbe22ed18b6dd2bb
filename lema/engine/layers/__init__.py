"""How a leased layer runs its rows, forward and backward: whole, or its experts in groups."""
