"""In a worker: the agent in its event loop, and rank tasks in their threads."""
