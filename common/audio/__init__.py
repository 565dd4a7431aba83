"""Recordings from files of any container, whole or not at all, and one judgement of
their levels.
"""
