"""What communicators that reduce on GPUs have in common: the device, and the host behind it."""
