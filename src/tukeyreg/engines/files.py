"""Rows in files that are larger than memory: Parquet, CSV, DuckDB databases and queries.

DuckDB reads, and hands over batches of Arrow; the kernel adds every batch up. How much memory that
takes does not depend on the number of rows, except where units have identifiers and `moments`
counts the rows of each: DuckDB does that, on disk where it must.

Formal guarantees
-----------------
A row's fate is decided by :func:`tukeyreg.intake.read_batch`, as in memory. Rows are added to their
groups one after the other, so that where a batch is cut changes no bit; the order of the rows in
the storage is taken as public. A file that cannot be read, or that changes meanwhile, ends the fit
before anything is released. No error carries a value of a row.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tukeyreg import intake
from tukeyreg.engines.contract import UnitDraws, groups_of
from tukeyreg.engines.progress import Progress
from tukeyreg.errors import InvalidInput, MissingExtra
from tukeyreg.grouping import keyed_groups
from tukeyreg.intake import Schema, TrainingRows
from tukeyreg.kernel import processors
from tukeyreg.mechanisms.randomness import Draws, Floats, Integers, Randomness
from tukeyreg.summaries.groups import GroupSummaries, GroupSums
from tukeyreg.summaries.rows import PilotRows, RowMap, UnitRows, weights_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

__all__ = ["FileEngine", "FileSource"]

#: Bytes of a batch, of which a few are in memory at a time; but so many rows at least.
_BATCH_BYTES, _LEAST_ROWS = 1 << 24, 1 << 13
#: Batches that may wait for work to be done on them.
_WAITING = 4
#: What DuckDB may hold before it goes on on the disk.
_MEMORY = "600MiB"
#: Rows that are kept while units are counted, from which a pilot can be taken: a few more than a
#: pilot has at most, if it is as small as can be.
_CANDIDATES = 300_000
#: Sums of 64 bits hold so many rows.
_MOST_ROWS = 1 << 33
#: Columns of the table of units: the unit, and how many rows it has.
_KEY, _SIZE = "tukeyreg unit", "tukeyreg rows of the unit"

_READERS = {
    ".parquet": "read_parquet",
    ".pq": "read_parquet",
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".txt": "read_csv",
}
_DATABASES = (".duckdb", ".ddb", ".db")


class FileSource:
    """Where rows come from, as SQL; and the connection that runs it.

    Parameters
    ----------
    source : path, list of paths, or None
        Files of one kind (a path may be a pattern), or one DuckDB database; None for a query that
        names its files itself.
    table, query : str, optional
        A table or view of the database; or a query.
    delimiter : str
        Of CSV files.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path] | None,
        *,
        table: str | None = None,
        query: str | None = None,
        delimiter: str = ",",
    ) -> None:
        paths = _paths(source)
        kind = _kind(paths)
        self.text = kind == "read_csv"
        self._files: list[Path] = []
        database = ":memory:"
        if kind == "database":
            if (table is None) == (query is None):
                raise InvalidInput("a DuckDB database needs either table= or query=.")
            self._files = [Path(paths[0])]
            database = paths[0]
        elif paths:
            if table is not None or query is not None:
                raise InvalidInput("table= and query= belong to a DuckDB database, or to no path.")
            self._files = _found(paths)
        elif query is None:
            raise InvalidInput("no source: give a path, or query=.")
        if len(delimiter) != 1:
            raise InvalidInput("delimiter must be one character.")
        self._stamp = self._stamps()
        self._scratch = tempfile.mkdtemp(prefix="tukeyreg-")  # for its owner only
        try:
            self._connection = _connect(database, self._scratch)
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        try:
            with self._reading():
                self.relation = self._relation(kind, table, query, delimiter)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def types(self, columns: Sequence[str] | None) -> pa.Table:
        """An empty table of the columns, or of all of them."""
        empty = self.empty(f"SELECT * FROM {self.relation}")
        if columns is None:
            return empty
        for name in columns:
            if name not in empty.column_names:
                raise InvalidInput(
                    f"there is no column {name!r}; there are {', '.join(empty.column_names)}."
                )
        return empty.select(list(columns))

    def empty(self, sql: str) -> pa.Table:
        """What a query returns, without rows."""
        with self._reading():
            return self._connection.sql(f"{sql} LIMIT 0").to_arrow_table()

    def number(self, sql: str) -> int:
        """The one number that a query returns."""
        with self._reading():
            (row,) = self._connection.sql(sql).fetchall()
        return int(row[0])

    def run(self, sql: str) -> None:
        """Carry out a statement."""
        with self._reading():
            self._connection.execute(sql)

    def visit(self, sql: str, rows: int, work: Callable[[pa.Table], None]) -> None:
        """Call ``work`` with the rows that a query returns, so many at a time and in order.

        One thread reads while another one works. Batches are let go where they were made: memory
        that comes and goes between threads costs as much time as the reading.
        """
        import pyarrow as pa

        with self._reading(), ThreadPoolExecutor(1) as worker:
            waiting: deque[tuple[Future[None], pa.RecordBatch]] = deque()
            for batch in self._connection.sql(sql).to_arrow_reader(rows):
                done = worker.submit(work, pa.Table.from_batches([batch]))
                waiting.append((done, batch))
                if len(waiting) > _WAITING:
                    waiting.popleft()[0].result()
            while waiting:
                waiting.popleft()[0].result()
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if self._stamps() != self._stamp:
            raise InvalidInput("the files changed while they were read; nothing was released.")

    def _stamps(self) -> list[tuple[int, int, int]]:
        try:
            found = [os.stat(path) for path in self._files]
        except OSError:
            return []
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]

    def _relation(self, kind: str, table: str | None, query: str | None, delimiter: str) -> str:
        if table is not None:
            return ".".join(map(quoted, table.split(".")))
        if query is not None:
            # A query need not give its rows in the same order twice; a table does.
            inner = query.strip().rstrip(";")
            self._connection.execute(f"CREATE TEMP TABLE tukeyreg_rows AS {inner}")
            return "tukeyreg_rows"
        if kind == "read_csv":
            return _csv(self._files, delimiter)
        return f"{kind}({_literals(self._files)})"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say of what DuckDB reports its kind only: its messages can quote rows."""
        import duckdb

        try:
            yield
        except InvalidInput:
            raise
        except (duckdb.Error, OSError, UnicodeError) as error:
            raise InvalidInput(self._explained(error)) from None
        except Exception as error:  # pyarrow passes on what happened while a batch was made
            if type(error).__module__.partition(".")[0] != "pyarrow":
                raise
            raise InvalidInput(self._explained(error)) from None

    def _explained(self, error: Exception) -> str:
        import duckdb

        damaged = [path for path in self._files if not self._opens(path)]
        if damaged:
            return f"{damaged[0]} could not be read: it is missing, truncated, or not of its kind."
        if self.text:
            return (
                "a CSV file could not be read: some row has another number of columns than the "
                "header, a quote is never closed, or the text is not UTF-8."
            )
        if isinstance(error, duckdb.OutOfMemoryException):
            return "DuckDB had too little memory, or too little space on the disk."
        if isinstance(error, (duckdb.CatalogException, duckdb.BinderException)):
            return "the query or table does not exist, or does not fit the database."
        if isinstance(error, duckdb.ParserException):
            return "the query is not valid SQL."
        if isinstance(error, duckdb.ConversionException):
            return "a value could not be converted in the query: use TRY_CAST, row by row."
        return f"reading failed ({type(error).__name__}): a file is damaged, or files do not match."

    def _opens(self, path: Path) -> bool:
        import duckdb

        try:
            if path.suffix in (".parquet", ".pq"):
                duckdb.sql(f"SELECT * FROM {_READERS[path.suffix]}({_literals([path])}) LIMIT 0")
            with path.open("rb"):
                return True
        except Exception:
            return False


def _connect(database: str, scratch: str) -> duckdb.DuckDBPyConnection:
    import duckdb

    try:
        connection = duckdb.connect(
            database,
            read_only=database != ":memory:",
            config={"memory_limit": _MEMORY, "temp_directory": scratch},
        )
    except (duckdb.Error, OSError):
        raise InvalidInput(
            f"{database} could not be opened: it is missing, locked by another process, truncated, "
            "or not a DuckDB database."
        ) from None
    connection.execute("SET preserve_insertion_order = true")
    # Both keep whole row groups in memory, and are slower on local disks.
    connection.execute("SET enable_external_file_cache = false")
    connection.execute("SET disable_parquet_prefetching = true")
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_progress_bar = false")
    return connection


def _paths(source: str | Path | Sequence[str | Path] | None) -> list[str]:
    if source is None:
        return []
    given: list[Any] = list(source) if isinstance(source, (list, tuple)) else [source]
    if not given or not all(isinstance(path, (str, Path)) for path in given):
        raise InvalidInput("source must be a path, or a list of paths.")
    return [str(path) for path in given]


def _kind(paths: list[str]) -> str:
    """How to read files, by the endings of their names."""
    kinds = set()
    for path in paths:
        name = Path(path.removesuffix(".gz"))
        if name.suffix in _DATABASES:
            kinds.add("database")
        elif name.suffix in _READERS:
            kinds.add(_READERS[name.suffix])
        else:
            raise InvalidInput(
                f"{path}: what kind of file this is cannot be told from its name; known are "
                f"{', '.join((*_READERS, *_DATABASES))}."
            )
    if len(kinds) > 1 or ("database" in kinds and len(paths) > 1):
        raise InvalidInput("files of different kinds, or several databases, are not read together.")
    return kinds.pop() if kinds else "query"


def _found(paths: list[str]) -> list[Path]:
    """All files, those of a pattern in the order of their names."""
    found: list[Path] = []
    for path in paths:
        if any(mark in path for mark in "*?["):
            anchor = Path(path).anchor
            parts = Path(path).relative_to(anchor) if anchor else Path(path)
            matching = sorted(file for file in Path(anchor).glob(str(parts)) if file.is_file())
            if not matching:
                raise InvalidInput(f"no file matches {path}.")
            found += matching
        elif Path(path).is_file():
            found.append(Path(path))
        else:
            raise InvalidInput(f"there is no file {path}.")
    return found


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def _literal(text: object) -> str:
    return "'" + str(text).replace("'", "''") + "'"


def _literals(values: Sequence[object]) -> str:
    return f"[{', '.join(map(_literal, values))}]"


def _csv(files: list[Path], delimiter: str) -> str:
    """All columns as text: what they hold must not decide of what type they are."""
    import csv
    import gzip

    headers = []
    for path in files:
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
            headers.append(next(csv.reader(stream, delimiter=delimiter), []))
    names = headers[0]
    if not names or len(set(names)) < len(names) or "" in names:
        raise InvalidInput(f"{files[0]}: the first line must name every column, each differently.")
    for path, header in zip(files, headers, strict=True):
        if header != names:
            raise InvalidInput(f"{path} has other columns than {files[0]}.")
    columns = ", ".join(f"{_literal(name)}: 'VARCHAR'" for name in names)
    return (
        f"read_csv({_literals(files)}, auto_detect=false, header=true, columns={{{columns}}}, "
        f"delim={_literal(delimiter)}, quote='\"', escape='\"', nullstr='')"
    )


class FileEngine:
    """Rows in files; see :class:`tukeyreg.engines.contract.Engine`.

    Parameters
    ----------
    source : FileSource
    target : str
    features : sequence of str or None
        None for all columns but the target and the privacy unit.
    privacy_unit : str or None
    categories : mapping of column to levels, or None
    randomness : Randomness
    progress : bool or None
        Whether to show how much was read; None to do so on a terminal.
    for_moments : bool
        Whether a pilot will be asked for: rows for it are kept while units are counted.
    """

    def __init__(
        self,
        source: FileSource,
        target: str,
        features: Sequence[str] | None,
        privacy_unit: str | None,
        categories: Mapping[Any, Sequence[Any]] | None,
        randomness: Randomness,
        *,
        progress: bool | None = None,
        for_moments: bool = True,
    ) -> None:
        self._source, self._target, self._unit = source, target, privacy_unit
        others = [target] if privacy_unit is None else [target, privacy_unit]
        chosen = None if features is None else [*features, *others]
        if chosen is not None and len(set(chosen)) < len(chosen):
            raise InvalidInput("a column is named twice among features, target and privacy unit.")
        given = source.types(chosen)
        for name in others:
            if name not in given.column_names:
                source.types([name])
        self._columns = _as_numbers(given, set(categories or ()), privacy_unit, text=source.text)
        self.schema: Schema = intake.declare(
            source.empty(f"SELECT {self._selected()} FROM {source.relation}"),
            target,
            categories=categories,
            privacy_unit=privacy_unit,
        )
        self._draws = UnitDraws.of(randomness)
        self._progress = Progress(progress)
        self._for_moments = for_moments
        self._candidates: _Candidates | None = None
        self._n_valid: int | None = None
        self._sizes = False

    @property
    def n_features(self) -> int:
        """The number of design columns."""
        return self.schema.n_design

    def n_units(self) -> int:
        """How many units the files have."""
        what = "*" if self._unit is None else f"DISTINCT {self._columns[self._unit]}"
        return self._source.number(f"SELECT count({what}) FROM {self._source.relation}")

    def n_valid_units(self) -> int:
        """How many units have a row that can be used."""
        if self._n_valid is None:
            if self._unit is None:
                self._n_valid = self._count_rows()
            else:
                self._count_units()
                self._n_valid = self._source.number("SELECT count(*) FROM tukeyreg_sizes")
        return self._n_valid

    def summaries(self, n_groups: int, neighboring: str, *, intercept: bool) -> GroupSummaries:
        """Group summaries: one pass, and another one if some groups are weak."""
        sums = GroupSums(
            n_groups,
            self.n_features,
            intercept=intercept,
            levels=self.schema.level_slices,
            threads=_threads(),
        )

        def add(first: int, rows: TrainingRows) -> None:
            sums.add(rows.columns, groups_of(rows, n_groups, self._draws.groups, first))

        def add_again(first: int, rows: TrainingRows) -> None:
            sums.add_again(rows.columns, groups_of(rows, n_groups, self._draws.groups, first))

        self._visit("adding up groups", add)
        if sums.weak().any():
            self._visit("looking again", add_again)
        return sums.summaries()

    def pilot(self, share: int, voters: int, coins: object = None) -> PilotRows:
        """A random part of the units; by draws of the engine's own, so ``coins`` are not used."""
        if self._unit is None:
            kept, self._candidates = self._candidates, None
            if kept is None or not kept.hold(share):
                kept = _Candidates(self._draws, share)
                self._visit("taking a pilot", kept.add)
            return kept.pilot(share, voters)
        return self._pilot_of_units(share, voters)

    def gradient(
        self, chosen: NDArray[np.bool_], map: RowMap, coefficients: Floats, bound: float
    ) -> Integers:
        """The sum of all integer rows times residuals, with the chosen features."""
        total = np.zeros(map.width, dtype=np.int64)

        def add(first: int, rows: TrainingRows) -> None:
            nonlocal total
            if first + len(rows) > _MOST_ROWS:
                raise InvalidInput(f"more than {_MOST_ROWS:,} rows do not fit.")
            kept = None if rows.excluded is None else ~rows.excluded
            weights = None if self._unit is None else weights_of(self._sizes_of_units)
            columns = rows.columns.of_features(chosen)
            total += map.gradient(columns, kept, weights, coefficients, bound, threads=_threads())

        if self._unit is not None:
            self._count_units()
        self._visit("adding up rows", add, sizes=self._unit is not None)
        return total

    # --- passes -----------------------------------------------------------------------------

    def _selected(self) -> str:
        return ", ".join(f"{sql} AS {quoted(name)}" for name, sql in self._columns.items())

    def _visit(
        self, what: str, visitor: Callable[[int, TrainingRows], None], *, sizes: bool = False
    ) -> None:
        """Call ``visitor`` with every batch of rows, and the place of its first row."""
        sql, names, selected = self._source.relation, list(self._columns), self._selected()
        if sizes:
            assert self._unit is not None
            selected += f", {quoted(_SIZE)}"
            sql += f" JOIN tukeyreg_sizes ON {self._columns[self._unit]} = {quoted(_KEY)}"
        first = 0

        def work(table: pa.Table) -> None:
            nonlocal first
            if sizes:
                self._sizes_of_units = table.column(_SIZE).to_numpy()
                table = table.select(names)
            rows = intake.read_batch(
                table, self._target, self.schema, self._unit, threads=_threads()
            )
            visitor(first, rows)
            first += table.num_rows
            shown(first)

        with self._progress.of(what) as shown:
            n_rows = max(_LEAST_ROWS, _BATCH_BYTES // (8 * (len(names) + 1)))
            self._source.visit(f"SELECT {selected} FROM {sql}", n_rows, work)

    def _count_rows(self) -> int:
        candidates = _Candidates(self._draws, 1, most=_CANDIDATES if self._for_moments else 0)
        total = 0

        def count(first: int, rows: TrainingRows) -> None:
            nonlocal total
            total += int(np.count_nonzero(rows.kept))
            if self._for_moments:
                candidates.add(first, rows)

        self._visit("counting units", count)
        if self._for_moments:
            self._candidates = candidates
        return total

    def _count_units(self) -> None:
        """The number of usable rows of every unit, in a table of DuckDB's."""
        if self._sizes:
            return
        assert self._unit is not None
        key = self._columns[self._unit]
        self._source.run(
            f"CREATE TEMP TABLE tukeyreg_sizes AS "
            f"SELECT {key} AS {quoted(_KEY)}, count(*) AS {quoted(_SIZE)} "
            f"FROM {self._source.relation} WHERE {self._usable()} GROUP BY 1"
        )
        self._sizes = True

    def _usable(self) -> str:
        """Which rows can be used, in SQL.

        It need not agree with the intake in every last case: rows that it leaves out are not in
        the join, and rows that the intake leaves out make weights smaller.
        """
        conditions = []
        for name, sql in self._columns.items():
            levels = self.schema.declared.get(name)
            if name == self._unit:
                conditions.append(f"{sql} IS NOT NULL")
            elif levels is not None:
                conditions.append(f"{sql} IN ({', '.join(map(_sql_level, levels))})")
            else:
                conditions.append(f"isfinite(CAST({sql} AS DOUBLE))")
        return " AND ".join(conditions)

    def _pilot_of_units(self, share: int, voters: int) -> PilotRows:
        designs, labels, votes = [], [], []
        names: list[bytes] = []

        def take(_: int, rows: TrainingRows) -> None:
            assert rows.units is not None
            places = np.flatnonzero(rows.kept)
            chosen = _of_units(rows, self._draws.pilot, share)
            votes_here = _of_units(rows, self._draws.voters, voters)
            places, votes_here = places[chosen], votes_here[chosen]
            designs.append(rows.columns.matrix(places))
            labels.append(rows.columns.labels(places))
            keys = rows.units.keys
            names.extend(keys[code] for code in rows.units.codes[chosen].tolist())
            votes.append(votes_here)

        self._visit("taking a pilot", take)
        position: dict[bytes, int] = {}
        codes = np.array([position.setdefault(name, len(position)) for name in names], np.int64)
        vote = np.zeros(len(position), dtype=bool)
        vote[codes] = np.concatenate([*votes, np.zeros(0, bool)])
        part = UnitRows(
            np.concatenate([*designs, np.zeros((0, self.n_features))]),
            np.concatenate([*labels, np.zeros(0)]),
            codes,
            len(position),
        )
        return PilotRows(part, part.of_units(vote))


def _threads() -> int:
    """Reading needs a processor, too."""
    return max(1, processors() - 1)


def _of_units(rows: TrainingRows, draws: Draws, share: int) -> NDArray[np.bool_]:
    """For every usable row whether its unit is one in so many."""
    assert rows.units is not None
    return np.asarray((keyed_groups(rows.units, share, draws) == 0)[rows.units.codes])


class _Candidates:
    """Usable rows of which a pilot can be taken once its share is known.

    While there are more than ``most``, the half with the larger draws is let go.
    """

    def __init__(self, draws: UnitDraws, share: int, most: int | None = None) -> None:
        self._draws, self._most = draws, most
        self._below = -(-(1 << 32) // share)
        self._parts: list[tuple[NDArray[Any], ...]] = []  # rows, labels, and the two draws
        self._count = 0

    def hold(self, share: int) -> bool:
        """Whether every row of such a pilot is here."""
        return -(-(1 << 32) // share) <= self._below

    def add(self, first: int, rows: TrainingRows) -> None:
        """Add a batch whose first row has this place."""
        words = [
            draws.of_rows(1 << 32, first, len(rows)).view(np.uint32)
            for draws in (self._draws.pilot, self._draws.voters)
        ]
        places = np.flatnonzero(rows.kept & (words[0].astype(np.int64) < self._below))
        columns = rows.columns
        self._parts.append(
            (columns.matrix(places), columns.labels(places), words[0][places], words[1][places])
        )
        self._count += len(places)
        while self._most is not None and self._count > self._most:
            self._below //= 2
            self._parts = [_where(part, self._below) for part in self._parts]
            self._count = sum(len(part[1]) for part in self._parts)

    def pilot(self, share: int, voters: int) -> PilotRows:
        """The rows whose draw is zero, and of these the voters; the others are let go."""
        parts = [_where(part, -(-(1 << 32) // share)) for part in self._parts]
        self._parts = []  # a second copy of the rows would be one too many
        design, target, _, votes = (np.concatenate([part[at] for part in parts]) for at in range(4))
        part = UnitRows(design, target, None, len(target))
        chosen = votes.astype(np.uint64) * np.uint64(voters) >> np.uint64(32) == 0
        return PilotRows(part, part.of_units(chosen))


def _where(part: tuple[Any, ...], below: int) -> tuple[Any, ...]:
    kept = part[2].astype(np.int64) < below
    return part if kept.all() else tuple(array[kept] for array in part)


def _sql_level(level: Any) -> str:
    if isinstance(level, bytes):
        return "'" + "".join(f"\\x{byte:02X}" for byte in level) + "'::BLOB"
    if isinstance(level, (bool, int, float)):
        return repr(level)
    return _literal(level)


def _as_numbers(
    given: pa.Table, declared: set[str], privacy_unit: str | None, *, text: bool
) -> dict[str, str]:
    """For every column the SQL that reads it, in types that need no conversion value by value."""
    import pyarrow as pa

    found = {}
    for field in given.schema:
        sql, kind = quoted(field.name), field.type
        if field.name == privacy_unit:
            # Minus zero is zero, and what is not a number is nobody.
            if pa.types.is_floating(kind):
                sql = f"nullif({sql} + 0, 'nan'::{'FLOAT' if kind == pa.float32() else 'DOUBLE'})"
        elif field.name not in declared:
            if text:
                truth = f"CASE lower({sql}) WHEN 'true' THEN 1 WHEN 'false' THEN 0 END"
                sql = f"coalesce(TRY_CAST({sql} AS DOUBLE), {truth})"
            elif pa.types.is_decimal(kind):
                sql = f"CAST({sql} AS DOUBLE)"
            elif pa.types.is_boolean(kind):
                sql = f"CAST({sql} AS UTINYINT)"
        found[field.name] = sql
    return found


def require() -> None:
    """Say which extra is missing, if it is."""
    try:
        import duckdb  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "fit_files needs DuckDB and pyarrow: pip install 'tukeyreg[files]'."
        ) from None
