"""Images, videos and sounds of rows: where they are, what of them may be read, and what the model's
processor makes of them.
"""
