"""In the scheduler's event loop: plugin, job service, controllers, heartbeats."""
