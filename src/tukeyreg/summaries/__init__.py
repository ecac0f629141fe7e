"""Rows -> what mechanisms see: (R_i, z_i) of every group, or exact sums of integer rows."""

from tukeyreg.summaries.groups import GroupSummaries

__all__ = ["GroupSummaries"]
