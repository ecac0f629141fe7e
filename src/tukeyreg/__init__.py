"""Differentially private linear regression that needs nothing but the data, epsilon and delta."""

from importlib.metadata import version

from tukeyreg.errors import (
    InvalidInput,
    MissingExtra,
    NotEnoughData,
    ReleaseRefused,
    TukeyregError,
    UndeclaredCategory,
)
from tukeyreg.privacy.budget import Budget, Guarantee
from tukeyreg.privacy.plan import Plan, plan
from tukeyreg.regression import TukeyRegressor, select
from tukeyreg.release import Release

__all__ = [
    "Budget",
    "Guarantee",
    "InvalidInput",
    "MissingExtra",
    "NotEnoughData",
    "Plan",
    "Release",
    "ReleaseRefused",
    "TukeyRegressor",
    "TukeyregError",
    "UndeclaredCategory",
    "plan",
    "select",
]

__version__ = version("tukeyreg")
