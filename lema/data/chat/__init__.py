"""Chats: the forms of messages in data sets, templates, and the places of answers in the
rendered text.
"""
