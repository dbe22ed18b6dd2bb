"""Public checkpoints without their weights: what is known of them offline, and what `lema init`
chooses for them.
"""
