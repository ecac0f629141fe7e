"""One group's rows -> (R_i, z_i); every engine returns the same value."""

from tukeyreg.summaries.groups import GroupSummaries

__all__ = ["GroupSummaries"]
