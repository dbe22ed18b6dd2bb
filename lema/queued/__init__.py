"""Copies between host and device on a device that works through queues: their order, by events alone.

What a queue and an event are, a backend says (`lema.queued.queues`); that every copy comes after what it must come
after is decided here, and proven on queues that take any course events allow.
"""
