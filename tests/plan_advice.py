"""Pieces of a plan's advice, read back as the arguments that they ask for."""

import re


def amount(advice):
    return re.search(r"[\d,.e+-]*\d", advice)[0].replace(",", "")


def with_advice(advice, options):
    """The arguments of a plan, changed as its advice says."""
    options = dict(options)
    for part in advice.split(" and "):
        if part.endswith("units"):
            options["n"] = int(amount(part))
        elif part.endswith("groups"):
            options["n_models"] = int(amount(part))
        elif part.startswith("epsilon = "):
            options["epsilon"] = float(amount(part))
        else:
            assert part.endswith("the intercept included")
            options["d"] = int(amount(part))
    return options
