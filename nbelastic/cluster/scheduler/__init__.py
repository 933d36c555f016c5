"""In the scheduler's event loop: plugin, job service, controllers, heartbeats.

All of it runs in that loop, so nothing needs a lock and nothing may block.
"""
