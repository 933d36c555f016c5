"""In a worker: the agent in its event loop, and rank tasks in their threads.

Modules that do not say otherwise run in that event loop.
"""
