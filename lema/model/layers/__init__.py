"""What is made of decoder layers: their kinds, and what is known of them with adapters attached."""
