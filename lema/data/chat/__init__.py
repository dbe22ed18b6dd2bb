"""Chats: their messages as data sets write them, their template, and where in what it writes the answers are."""
