"""In the kernel: the job client, checks before a job, and the user's modules."""
