"""Steps of micro-batches: the same bits for every number of ranks."""

from nbelastic.torch.gradients.micro_batches.reduction import MicroBatchReduction, PreviousSteps
from nbelastic.torch.gradients.micro_batches.tree_sums import MicroBatchSum, sum_over_ranks

__all__ = ["MicroBatchReduction", "MicroBatchSum", "PreviousSteps", "sum_over_ranks"]
