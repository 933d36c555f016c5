"""In the kernel: the job client, checks before a job, and the user's modules.

All but the client runs in the thread that calls ``fit``.
"""
