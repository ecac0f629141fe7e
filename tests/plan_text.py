"""What a plan prints, read back: its table, and its advice as the arguments that it asks for."""

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


def printed_table(made):
    """The table that a plan prints, as a dictionary; its columns stand where they should."""
    lines = str(made).split("\n")
    width = max(len(name) for name, _ in made.rows()) + 2
    assert all(line[width - 2 : width] == "  " and line[width] != " " for line in lines)
    return lines, {line[:width].strip(): line[width:] for line in lines}
