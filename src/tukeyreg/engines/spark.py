"""Rows of a Spark data frame: tasks add them up where they lie, the driver sees sums only.

Every job is a ``mapInArrow`` of the plan that the frame stands for. A task reads batches as all
engines do, and gives one small answer for its partition. There is no state but the frame.

Formal guarantees
-----------------
*What is collected.* Group summaries, counts, exact sums, and votes for locations, those of every
column sorted on their own. The rows of the pilot stay in Spark's storage until :meth:`close`.
Errors name the kind of a failure and nothing else: messages and tracebacks of Spark can quote rows.

*Isolation.* A partition's rows are added to their groups one after the other, and the parts of a
group are merged in the order of the partitions, so a unit changes its own group in any bit and no
other one (docs/method.md, section 2). Which rows a partition has, in which order, is taken as
public. Exact sums do not depend on it.

*Retries.* A task is a function of its partition and of keys, so it may run again, or twice at
once. Where each row is a unit, draws go by places in a partition. If a partition comes in another
order when it is read again, answers that would mix the two are refused, see ``mark``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tukeyreg import intake, kernel
from tukeyreg.engines.contract import UnitDraws, groups_of
from tukeyreg.errors import InvalidInput, MissingExtra
from tukeyreg.grouping import keyed_groups
from tukeyreg.intake import Schema, TrainingRows
from tukeyreg.kernel import Columns, Triangles
from tukeyreg.mechanisms.randomness import Draws, Floats, Integers, Randomness
from tukeyreg.summaries.groups import GroupSummaries
from tukeyreg.summaries.rows import (
    HIGHEST,
    LOWEST,
    MOST_ROWS,
    PilotRows,
    RowMap,
    UnitRows,
    weights_of,
)
from tukeyreg.units import Units

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["SparkEngine", "SparkPilot", "require"]

Batches = Iterator[Any]
_Result = TypeVar("_Result")

#: What tasks answer: of which partition, which part of the answer, a mark of the rows it was made
#: from, and the numbers themselves.
_ANSWER = "part long, at int, mark binary, data binary"
#: Rows on their way to those of the same unit.
_KEYED = "key binary, place long, data binary"
#: Bytes of groups, or of rows, in one value of a data frame.
_GROUP_BYTES, _ROW_BYTES = 1 << 17, 1 << 22
#: The driver merges so many bytes by itself. If there are more, or nobody knows, Spark does.
_MOST_BYTES = 1 << 28
#: A partition has fewer rows than two to this.
_PART_BITS = 40
#: Of a histogram of magnitudes.
_CELLS = HIGHEST - LOWEST + 1
_LARGEST, _LOW = np.int64(2**63 - 1), np.int64(2**32 - 1)


def require() -> None:
    """Raise ``MissingExtra`` where the extra is not installed."""
    # PySpark asks for pandas before it gives batches of Arrow.
    missing = [name for name in ("pyspark", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"fit_spark needs {', '.join(missing)}: pip install 'tukeyreg[spark]'.")


class SparkEngine:
    """Rows of a Spark data frame; see :class:`tukeyreg.engines.contract.Engine`.

    It is a context manager: in the end Spark forgets the rows of the pilot.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        It must give the same rows every time.
    target : str
    features : sequence of str or None
        None for all columns but the target and the privacy unit.
    privacy_unit : str or None
    categories : mapping of column to levels, or None
    randomness : Randomness

    Raises
    ------
    MissingExtra
        PySpark, or what it needs for Arrow, is not installed.
    InvalidInput
        A column is missing or has a type that cannot be used.
    """

    def __init__(
        self,
        frame: DataFrame,
        target: str,
        features: Sequence[str] | None,
        privacy_unit: str | None,
        categories: Mapping[Any, Sequence[Any]] | None,
        randomness: Randomness,
    ) -> None:
        require()
        self._reader, self._frame = _read(frame, target, features, privacy_unit, categories)
        self._draws = UnitDraws.of(randomness)
        self._by_unit = privacy_unit is not None
        self._n_parts: int | None = None
        self._stored: list[DataFrame] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let Spark forget the rows of pilots; a model that is there is not lost if it cannot."""
        while self._stored:
            with suppress(Exception):
                self._stored.pop().unpersist()

    @property
    def schema(self) -> Schema:
        """What a row for prediction must look like."""
        return self._reader.schema

    @property
    def n_features(self) -> int:
        """The number of design columns."""
        return self.schema.n_design

    def n_units(self) -> int:
        """How many units the frame has."""
        return self._distinct(usable=False) if self._by_unit else _guarded(self._frame.count)

    def n_valid_units(self) -> int:
        """How many units have a row that can be used."""
        if self._by_unit:
            return self._distinct(usable=True)
        found = _answers(_asked(self._frame, partial(_count, self._reader)))
        self._n_parts = max((answer.part + 1 for answer in found), default=0)
        return int(_total(found, (1,))[0])

    def summaries(self, n_groups: int, neighboring: str, *, intercept: bool) -> GroupSummaries:
        """Group summaries in one pass over the rows, every partition's by QR.

        A second look at the rows of weak groups would need them in the same order.
        """
        if neighboring == "replace-one" and self._by_unit:
            raise InvalidInput(
                "neighboring='replace-one' with a privacy unit needs all units at once to be dealt "
                "out evenly, which Spark does not do: use 'add-remove', or method='moments'."
            )
        shape = _Shape(n_groups, self.n_features + 1 + int(intercept))
        work = partial(_summarise, self._reader, self._draws.groups, shape, intercept)
        merged = self._merged(_asked(self._frame, work), shape)
        triangles = np.zeros((n_groups, shape.width, shape.width))
        for answer in merged:
            exponents, upper = shape.unpacked(answer.data)
            triangles[answer.at : answer.at + len(upper)] = shape.scaled(upper, exponents)
        return GroupSummaries.of_triangles(triangles)

    def pilot(self, share: int, voters: int, coins: object = None) -> SparkPilot:
        """A random part of the units; by draws of the engine's own, so ``coins`` are not used."""
        from pyspark import StorageLevel

        arguments = (self._reader, self._draws, share, voters)
        if self._by_unit:
            rows = _mapped(self._frame, partial(_pilot_of_units, *arguments), _KEYED)
            frame = _asked(_gathered(rows, "key"), partial(_brought_together, self.n_features))
        else:
            frame = _gathered(_asked(self._frame, partial(_pilot_of_rows, *arguments)), "part")
        # On disks: a dozen small questions are no reason to take memory from executors.
        self._stored.append(_guarded(lambda: frame.persist(StorageLevel.DISK_ONLY)))
        return SparkPilot(self._stored[-1], self.n_features, coded=self._by_unit)

    def gradient(
        self, chosen: NDArray[np.bool_], map: RowMap, coefficients: Floats, bound: float
    ) -> Integers:
        """The sum of all integer rows times residuals, with the chosen features."""
        gradient = _Gradient(map, coefficients, bound)
        if not self._by_unit:
            frame = _asked(self._frame, partial(_gradient_of_rows, self._reader, chosen, gradient))
        else:
            rows = _mapped(self._frame, partial(_rows_of_units, self._reader, chosen), _KEYED)
            frame = _asked(_with_sizes(rows), partial(_gradient_of_units, gradient))
        return _total(_answers(frame), (map.width,))

    def _distinct(self, *, usable: bool) -> int:
        keys = _mapped(self._frame, partial(_keys, self._reader, usable), "key binary")
        return _guarded(keys.distinct().count)

    def _merged(self, parts: DataFrame, shape: _Shape) -> list[_Answer]:
        """The parts of every group in one, by whomever has room for them."""
        merge = partial(_merge, shape)
        if self._n_parts is not None and self._n_parts * shape.n_bytes <= _MOST_BYTES:
            found = sorted(_answers(parts), key=lambda answer: (answer.at, answer.part))
            return [merge(list(same)) for _, same in groupby(found, lambda answer: answer.at)]
        found = _answers(_grouped(parts, merge))
        if len({answer.mark for answer in found}) > 1:
            raise _another_order()
        return found


# Reading the frame


@dataclass(frozen=True)
class _Reader:
    """How batches are read, in tasks as elsewhere."""

    names: tuple[str, ...]
    target: str
    schema: Schema
    unit: str | None

    def rows(self, batches: Batches) -> Iterator[tuple[int, TrainingRows]]:
        """Rows batch by batch, and how many of the partition came before."""
        import pyarrow as pa

        first = 0
        for batch in batches:
            table = pa.Table.from_arrays(batch.columns, names=list(self.names))
            rows = intake.read_batch(table, self.target, self.schema, self.unit)
            yield first, rows
            first += len(rows)


def _read(
    frame: DataFrame,
    target: str,
    features: Sequence[str] | None,
    unit: str | None,
    categories: Mapping[Any, Sequence[Any]] | None,
) -> tuple[_Reader, DataFrame]:
    """How to read the columns of a frame, and the frame with these columns only."""
    from pyspark.sql import DataFrame

    if not isinstance(frame, DataFrame):
        raise InvalidInput(f"fit_spark needs a Spark DataFrame, got {type(frame).__name__}.")
    if isinstance(features, str):
        raise InvalidInput("features must be a list of names.")
    if _guarded(lambda: frame.isStreaming):
        raise InvalidInput("the data frame is a stream: read it as a batch.")
    fields = list(_guarded(lambda: frame.schema.fields))
    others = [target] if unit is None else [target, unit]
    names = [field.name for field in fields]
    if features is None:
        features = [name for name in names if name not in others]
    used = [*features, *others]
    for name in used:
        if not isinstance(name, str) or names.count(name) != 1:
            several = "several columns" if name in names else "no column"
            raise InvalidInput(f"the data frame has {several} of the name {name!r}.")
        if used.count(name) > 1:
            raise InvalidInput(f"column {name!r} has two roles: feature, target, privacy unit.")
    places = [names.index(name) for name in used]
    schema = intake.declare(
        _empty([fields[at] for at in places]), target, categories=categories, privacy_unit=unit
    )
    # By position: names may hold dots, or differ in upper and lower case only.
    plain = frame.toDF(*[f"c{at}" for at in range(len(names))])
    reader = _Reader(tuple(used), target, schema, unit)
    return reader, plain.select(*[f"c{at}" for at in places])


def _empty(fields: list[Any]) -> Any:
    """A table without rows of the types that tasks see."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_type

    types = {}
    for field in fields:
        try:
            types[field.name] = to_arrow_type(field.dataType, timezone="UTC")
        except Exception:
            types[field.name] = None
        if types[field.name] is None:
            kind = field.dataType.simpleString()
            raise InvalidInput(f"Column {field.name!r} has type {kind}, which Arrow does not know.")
    return pa.schema(list(types.items())).empty_table()


# Answers


@dataclass(frozen=True, repr=False)
class _Answer:
    """What a task says of its partition.

    The mark is the same for answers from the same rows, where it matters.
    """

    part: int
    at: int
    mark: bytes
    data: bytes


def _asked(frame: DataFrame, work: Callable[[int, Batches], Iterator[_Answer]]) -> DataFrame:
    """What every task answers."""

    def batches_of_answers(part: int, batches: Batches) -> Batches:
        return (_table([answer]) for answer in work(part, batches))

    return _mapped(frame, batches_of_answers, _ANSWER)


def _mapped(frame: DataFrame, work: Callable[[int, Batches], Batches], schema: str) -> DataFrame:
    """What tasks make of the batches of their partitions."""

    def task(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        # An error of a library could quote a value; Spark would log it.
        failure = ""
        try:
            with np.errstate(all="ignore"):
                yield from work(context.partitionId(), batches)
        except Exception as error:
            failure = type(error).__name__
        if failure:
            raise RuntimeError(f"a task of tukeyreg failed: {failure}")

    return _guarded(lambda: frame.mapInArrow(task, schema))


def _grouped(frame: DataFrame, work: Callable[[list[_Answer]], _Answer]) -> DataFrame:
    """One answer for all that have the same ``at``."""

    def task(table):  # type: ignore[no-untyped-def]  # PySpark would read annotations
        with np.errstate(all="ignore"):
            return _table([work(_answers_of(table))], whole=True)

    return _guarded(lambda: frame.groupBy("at").applyInArrow(task, _ANSWER))


def _table(answers: list[_Answer], *, whole: bool = False) -> Any:
    import pyarrow as pa

    kind = pa.Table if whole else pa.RecordBatch
    return kind.from_arrays(
        [
            pa.array([answer.part for answer in answers], pa.int64()),
            pa.array([answer.at for answer in answers], pa.int32()),
            pa.array([answer.mark for answer in answers], pa.binary()),
            pa.array([answer.data for answer in answers], pa.binary()),
        ],
        names=["part", "at", "mark", "data"],
    )


def _answers(frame: DataFrame) -> list[_Answer]:
    """Run the job and collect the answers, in the order of partitions."""
    return _answers_of(_guarded(frame.toArrow))


def _answers_of(table: Any) -> list[_Answer]:
    columns = (table[name].to_pylist() for name in ("part", "at", "mark", "data"))
    found = [_Answer(*row) for row in zip(*columns, strict=True)]
    return sorted(found, key=lambda answer: (answer.part, answer.at))


def _guarded(action: Callable[[], _Result]) -> _Result:
    """Spark's answer, or an error that names the kind of a failure: messages can quote rows."""
    try:
        return action()
    except Exception as error:
        kind = type(error).__name__
        condition = getattr(error, "getCondition", lambda: None)()
    raise InvalidInput(
        f"Spark failed ({kind}{f', {condition}' if condition else ''}). Its message is not "
        "repeated, because it can quote rows; "
        "df.write.format('noop').mode('overwrite').save() reads the same rows and shows it."
    )


def _another_order() -> InvalidInput:
    return InvalidInput(
        "a partition was read again and its rows came in another order: write the data frame to "
        "storage first, or sort within partitions."
    )


def _total(parts: list[_Answer], shape: tuple[int, ...]) -> Integers:
    """The exact sum of integers; what does not fit into 64 bits is cut.

    Cutting brings two sums no further apart, so what a unit can change stays bounded.
    """
    high, low = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for part in parts:
        integers = np.frombuffer(part.data, dtype=np.int64).reshape(shape)
        high += integers >> 32
        low += integers & _LOW
    high += low >> 32
    fitting = np.clip(high, -(1 << 31), (1 << 31) - 1)
    total = np.where(high == fitting, (fitting << 32) | (low & _LOW), np.sign(high) * _LARGEST)
    return np.maximum(total, -_LARGEST)


# Counts


def _count(reader: _Reader, part: int, batches: Batches) -> Iterator[_Answer]:
    total = sum(int(rows.kept.sum()) for _, rows in reader.rows(batches))
    yield _Answer(part, 0, b"", np.array([total]).tobytes())


def _keys(reader: _Reader, usable: bool, part: int, batches: Batches) -> Batches:
    """The units of every batch."""
    import pyarrow as pa

    for _, rows in reader.rows(batches):
        units = rows.units if usable else rows.all_units
        assert units is not None
        yield pa.RecordBatch.from_arrays([pa.array(units.keys, pa.binary())], names=["key"])


# Groups


@dataclass(frozen=True)
class _Shape:
    """How the triangles of groups are packed: exponents, then what is not below the diagonal."""

    n_groups: int
    width: int

    @property
    def n_bytes(self) -> int:
        """Of all groups."""
        return self.n_groups * self._group_bytes

    @property
    def ranges(self) -> list[slice]:
        """The groups in parts of a size that can be merged at once."""
        step = max(1, _GROUP_BYTES // self._group_bytes)
        return [slice(at, min(at + step, self.n_groups)) for at in range(0, self.n_groups, step)]

    def packed(self, state: Triangles, groups: slice) -> bytes:
        w = self.width
        rows, columns = np.triu_indices(w)
        exponents = state.exponent[groups, :w].astype(np.int32)
        return exponents.tobytes() + state.triangle[groups, rows, columns].tobytes()

    def unpacked(self, data: bytes) -> tuple[NDArray[np.int32], Floats]:
        n = len(data) // self._group_bytes
        cut = 4 * n * self.width
        exponents = np.frombuffer(data[:cut], dtype=np.int32).reshape(n, self.width)
        return exponents, np.frombuffer(data[cut:], dtype=np.float64).reshape(n, -1)

    def scaled(self, upper: Floats, exponents: NDArray[np.int32]) -> Floats:
        """Triangles (n, w, w) times powers of two, column by column."""
        rows, columns = np.triu_indices(self.width)
        out = np.zeros((len(upper), self.width, self.width))
        with np.errstate(over="ignore"):
            out[:, rows, columns] = np.ldexp(upper, exponents[:, columns])
        return out

    @property
    def _group_bytes(self) -> int:
        return 4 * self.width + 4 * self.width * (self.width + 1)


def _summarise(
    reader: _Reader, draws: Draws, shape: _Shape, intercept: bool, part: int, batches: Batches
) -> Iterator[_Answer]:
    """Triangles of the rows of a partition."""
    state = Triangles(shape.n_groups, shape.width - 1 - int(intercept), intercept=intercept)
    for first, rows in reader.rows(batches):
        groups = groups_of(rows, shape.n_groups, replace(draws, part=part), first)
        kernel.absorb(rows.columns, groups, state)
    kernel.flush(state)
    packed = [(groups.start, shape.packed(state, groups)) for groups in shape.ranges]
    mark = b"" if reader.unit else _mark(draws, *(data for _, data in packed))
    for start, data in packed:
        yield _Answer(part, start, mark, data)


def _mark(draws: Draws, *data: bytes) -> bytes:
    """What only the same rows in the same order give."""
    mark = hashlib.blake2b(digest_size=16, key=draws.key)
    for piece in data:
        mark.update(piece)
    return mark.digest()


def _merge(shape: _Shape, parts: list[_Answer]) -> _Answer:
    """QR of the triangles of some groups from all partitions, in the order of these.

    A group's bits depend on its own triangles only: its scale is its own, and rows of zeros are
    left out, so that it does not matter whether a partition has rows of other groups.
    """
    triangles = [shape.unpacked(part.data) for part in parts]
    exponents = np.max([exponent for exponent, _ in triangles], axis=0)
    n = len(exponents)
    state = Triangles(n, shape.width - 1, intercept=False)
    for exponent, upper in triangles:
        rows = shape.scaled(upper, exponent - exponents).reshape(-1, shape.width)
        groups = np.repeat(np.arange(n, dtype=np.int32), shape.width)
        groups[~rows.any(axis=1)] = -1
        kernel.absorb(Columns.of(rows[:, :-1], rows[:, -1]), groups, state)
    kernel.flush(state)
    state.exponent[:, : shape.width] += exponents
    marks = b"".join(b"%d %b" % (part.part, part.mark) for part in parts)
    mark = hashlib.blake2b(marks, digest_size=16).digest() if parts[0].mark else b""
    return _Answer(0, parts[0].at, mark, shape.packed(state, slice(0, n)))


# The pilot


class SparkPilot:
    """The pilot of :class:`tukeyreg.summaries.rows.PilotRows`, its rows in Spark's storage.

    A unit's rows are in one partition, in the order in which they came.
    """

    def __init__(
        self,
        frame: DataFrame,
        n_features: int,
        *,
        coded: bool,
        seen: NDArray[np.bool_] | None = None,
        marks: dict[int, bytes] | None = None,
    ) -> None:
        self._frame, self._n_features, self._coded = frame, n_features, coded
        self._seen = np.ones(n_features, dtype=bool) if seen is None else seen
        self._marks: dict[int, bytes] = {} if marks is None else marks
        self._votes: dict[int, Floats] = {}

    def votes(self, j: int) -> Floats:
        """One vote of each voter for the location of a column; the target is the last."""
        if not self._votes:
            columns = range(self._n_features + 1)
            found = self._ask("votes", [(column,) for column in columns])
            for column in columns:
                votes = [np.frombuffer(part.data) for part in found if part.at == column]
                self._votes[column] = np.sort(np.concatenate([np.empty(0), *votes]))
        return self._votes[j]

    def profiles(self, location: Floats) -> Integers:
        """For every column the profile of its distances from the location, unit by unit."""
        return self._sum("profiles", (len(location), _CELLS), location)

    def of_features(self, chosen: NDArray[np.bool_]) -> SparkPilot:
        """The same units with the chosen features only."""
        seen = self._seen.copy()
        seen[seen] = chosen
        return SparkPilot(
            self._frame, self._n_features, coded=self._coded, seen=seen, marks=self._marks
        )

    def norm_counts(self, map: RowMap, edges: Floats) -> Integers:
        """How many units have rows whose norm lies between which edges."""
        return self._sum("norm_counts", (len(edges) + 1,), map, edges)

    def gram(self, map: RowMap) -> Integers:
        """The sum of outer products of integer rows."""
        return self._sum("gram", (map.width, map.width), map)

    def residual_counts(self, map: RowMap, coefficients: Floats) -> Integers:
        """The profile of the residuals, unit by unit."""
        return self._sum("residual_counts", (_CELLS,), map, coefficients)

    def gradient(self, map: RowMap, coefficients: Floats, bound: float) -> Integers:
        """The sum of integer rows times residuals."""
        return self._sum("gradient", (map.width,), map, coefficients, bound)

    def _sum(self, name: str, shape: tuple[int, ...], *arguments: object) -> Integers:
        return _total(self._ask(name, [arguments]), shape)

    def _ask(self, name: str, arguments: list[tuple[object, ...]]) -> list[_Answer]:
        """Every partition's answers, which must be of the same rows as those before."""
        work = partial(_of_pilot, self._n_features, self._coded, self._seen, name, arguments)
        found = _answers(_asked(self._frame, work))
        marks = {answer.part: answer.mark for answer in found}
        if not self._marks:
            self._marks.update(marks)
        if marks != self._marks:
            raise _another_order()
        return found


def _pilot_of_rows(
    reader: _Reader, draws: UnitDraws, share: int, voters: int, part: int, batches: Batches
) -> Iterator[_Answer]:
    """The rows of a partition that are in the pilot, batch by batch."""
    at = 0
    for first, rows in reader.rows(batches):
        chosen = rows.kept & _one_in(share, draws.pilot, part, first, len(rows))
        votes = _one_in(voters, draws.voters, part, first, len(rows))
        matrix = _matrix(rows.columns, np.flatnonzero(chosen), votes[chosen])
        for data in _pieces(matrix):
            yield _Answer(part, at, _mark(draws.pilot, data), data)
            at += 1


def _one_in(share: int, draws: Draws, part: int, first: int, n_rows: int) -> NDArray[np.bool_]:
    return np.asarray(replace(draws, part=part).of_rows(share, first, n_rows) == 0)


def _pilot_of_units(
    reader: _Reader, draws: UnitDraws, share: int, voters: int, part: int, batches: Batches
) -> Batches:
    """The rows of units in the pilot, with what brings them together."""
    for first, rows in reader.rows(batches):
        assert rows.units is not None
        chosen = keyed_groups(rows.units, share, draws.pilot) == 0
        votes = keyed_groups(rows.units, voters, draws.voters) == 0
        here = chosen[rows.units.codes]
        places, codes = np.flatnonzero(rows.kept)[here], rows.units.codes[here]
        matrix = _matrix(rows.columns, places, votes[codes])
        yield from _keyed(rows.units, codes, places + first + (part << _PART_BITS), matrix)


def _brought_together(n_features: int, part: int, batches: Batches) -> Iterator[_Answer]:
    """The rows of whole units, in the order in which they came, with numbers for the units."""
    numbers: dict[bytes, int] = {}
    places, rows = [], []
    for batch in batches:
        codes = [numbers.setdefault(key, len(numbers)) for key in batch.column("key").to_pylist()]
        places.append(batch.column("place").to_numpy())
        rows.append(np.column_stack([_unpacked(batch.column("data"), n_features + 2), codes]))
    if rows:
        order = np.argsort(np.concatenate(places))
        for at, data in enumerate(_pieces(np.concatenate(rows)[order])):
            yield _Answer(part, at, b"", data)


def _gathered(frame: DataFrame, column: str) -> DataFrame:
    """What has the same value in one partition, and no more partitions than there is work for.

    A pilot is small, and is asked many questions.
    """

    def gathered() -> DataFrame:
        session = frame.sparkSession
        try:
            n_cores = session.sparkContext.defaultParallelism
        except Exception:  # Spark Connect does not tell
            n_cores = 16
        shuffled = int(str(session.conf.get("spark.sql.shuffle.partitions")))
        return frame.repartition(max(1, min(2 * n_cores, shuffled)), column)

    return _guarded(gathered)


def _of_pilot(
    n_features: int,
    coded: bool,
    seen: NDArray[np.bool_],
    name: str,
    arguments: list[tuple[Any, ...]],
    part: int,
    batches: Batches,
) -> Iterator[_Answer]:
    """What the pilot of a partition answers to a question."""
    pieces = [piece for batch in batches for piece in _answers_of(batch)]
    if not pieces:
        return
    pieces.sort(key=lambda piece: (piece.part, piece.at))
    data = b"".join(piece.data for piece in pieces)
    pilot = _pilot(np.frombuffer(data).reshape(-1, n_features + 2 + coded), n_features)
    mark = hashlib.blake2b(b"".join(piece.mark for piece in pieces), digest_size=16).digest()
    for at, given in enumerate(arguments):
        answer = getattr(pilot.of_features(seen), name)(*given)
        # In the order of rows, votes for several columns could be linked.
        answer = np.sort(answer) if name == "votes" else answer
        yield _Answer(part, at, mark, answer.tobytes())


def _pilot(matrix: Floats, p: int) -> PilotRows:
    """From rows of features, target, whether the unit votes, and its number if it has one."""
    design, target = np.ascontiguousarray(matrix[:, :p]), matrix[:, p].copy()
    votes = matrix[:, p + 1] > 0
    if matrix.shape[1] == p + 2:
        rows = UnitRows(design, target, None, len(target))
    else:
        codes = matrix[:, p + 2].astype(np.int64)
        rows = UnitRows(design, target, codes, int(codes.max()) + 1)
        votes = np.bincount(codes, votes, rows.n_units) > 0
    return PilotRows(rows, rows.of_units(votes))


# Rows on their way


def _matrix(columns: Columns, places: Integers, *others: NDArray[Any]) -> Floats:
    """Features, target and more of some rows, side by side."""
    return np.column_stack([columns.matrix(places), columns.labels(places), *others])


def _pieces(matrix: Floats) -> Iterator[bytes]:
    step = max(1, _ROW_BYTES // (8 * matrix.shape[1]))
    for at in range(0, len(matrix), step):
        yield matrix[at : at + step].tobytes()


def _keyed(units: Units, codes: Integers, places: Integers, matrix: Floats) -> Batches:
    import pyarrow as pa

    keys, width, data = units.keys, 8 * matrix.shape[1], matrix.tobytes()
    yield pa.RecordBatch.from_arrays(
        [
            pa.array([keys[code] for code in codes.tolist()], pa.binary()),
            pa.array(places, pa.int64()),
            pa.array([data[at : at + width] for at in range(0, len(data), width)], pa.binary()),
        ],
        names=["key", "place", "data"],
    )


def _unpacked(column: Any, width: int) -> Floats:
    return np.frombuffer(b"".join(column.to_pylist())).reshape(-1, width)


# Sums over all rows


@dataclass(frozen=True, repr=False)
class _Gradient:
    """The numbers that fix a sum of integer rows times residuals."""

    map: RowMap
    coefficients: Floats
    bound: float

    def answers(
        self,
        part: int,
        parts: Iterator[tuple[Columns, NDArray[np.bool_] | None, Floats | None]],
    ) -> Iterator[_Answer]:
        """Sums of as many rows as 64 bits hold."""
        total, n_rows = np.zeros(self.map.width, dtype=np.int64), 0
        for columns, kept, weights in parts:
            if n_rows + len(columns) > MOST_ROWS:
                yield _Answer(part, 0, b"", total.tobytes())
                total, n_rows = np.zeros_like(total), 0
            total += self.map.gradient(columns, kept, weights, self.coefficients, self.bound)
            n_rows += len(columns)
        yield _Answer(part, 0, b"", total.tobytes())


def _gradient_of_rows(
    reader: _Reader,
    chosen: NDArray[np.bool_],
    gradient: _Gradient,
    part: int,
    batches: Batches,
) -> Iterator[_Answer]:
    return gradient.answers(
        part,
        (
            (
                rows.columns.of_features(chosen),
                None if rows.excluded is None else ~rows.excluded,
                None,
            )
            for _, rows in reader.rows(batches)
        ),
    )


def _rows_of_units(
    reader: _Reader, chosen: NDArray[np.bool_], part: int, batches: Batches
) -> Batches:
    """All usable rows, with what tells how many others their units have."""
    for first, rows in reader.rows(batches):
        assert rows.units is not None
        places = np.flatnonzero(rows.kept)
        matrix = _matrix(rows.columns.of_features(chosen), places)
        yield from _keyed(rows.units, rows.units.codes, places + first, matrix)


def _with_sizes(rows: DataFrame) -> DataFrame:
    """The rows, each with the number of rows of its unit."""
    from pyspark.sql import Window
    from pyspark.sql.functions import count, lit

    def sized() -> DataFrame:
        size = count(lit(1)).over(Window.partitionBy("key"))
        return rows.select("data", size.alias("size"))

    return _guarded(sized)


def _gradient_of_units(gradient: _Gradient, part: int, batches: Batches) -> Iterator[_Answer]:
    def rows() -> Iterator[tuple[Columns, None, Floats]]:
        for batch in batches:
            matrix = _unpacked(batch.column("data"), len(gradient.map.location) + 1)
            columns = Columns.of(matrix[:, :-1], matrix[:, -1])
            yield columns, None, weights_of(batch.column("size").to_numpy())

    return gradient.answers(part, rows())
