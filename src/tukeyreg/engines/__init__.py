"""Where the rows are: in memory, in files, on a cluster. All engines answer the same questions.

An engine reads rows and tells the mechanisms what they ask for: counts, group summaries, exact
sums and votes. What becomes of a row, which group its unit is in and whether its unit is in the
pilot do not depend on the engine: they are functions of the row, of its unit and of keys.
"""

from tukeyreg.engines.contract import Engine, UnitDraws
from tukeyreg.engines.memory import MemoryEngine

__all__ = ["Engine", "MemoryEngine", "UnitDraws"]
