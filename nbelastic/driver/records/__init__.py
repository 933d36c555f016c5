"""Records of a job for people: history in words, output, metrics, explanations."""

from .job_log import KernelLog
from .why import explain, explain_journal

__all__ = ["KernelLog", "explain", "explain_journal"]
