"""Which privacy unit each row belongs to.

A unit is known by a canonical byte string which depends on nothing but its own identifier, so
that a keyed hash of it is the same whoever else is in the data, and whichever library holds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt

from tukeyreg._tables import Column

__all__ = ["Units", "canonical_key", "identify", "integers_of"]

_MISSING = -1
# Two values of these types that are equal have the same canonical key.
_PLAIN = frozenset({str, bytes, bool, int, float, type(None)})


@dataclass(frozen=True, eq=False, repr=False)
class Units:
    """The unit of each row.

    Attributes
    ----------
    codes : ndarray of int64
        For each row the position of its unit in `names`. The numbers themselves mean nothing:
        they shift when rows come or go.
    names : list of bytes, or ndarray of int64
        The canonical key of each unit, see :func:`canonical_key`, or the integers it would spell.
    """

    codes: npt.NDArray[np.int64]
    names: list[bytes] | npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def keys(self) -> list[bytes]:
        """The canonical key of each unit."""
        if isinstance(self.names, list):
            return self.names
        return [b"i%d" % name for name in self.names.tolist()]

    def of_rows(self, kept: npt.NDArray[np.bool_]) -> Units:
        """Only the rows in `kept`, and only the units that they have.

        Examples
        --------
        >>> import numpy as np
        >>> units = Units(np.array([0, 1, 1]), [b"i7", b"i8"])
        >>> units.of_rows(np.array([False, True, True])).keys
        [b'i8']
        """
        codes = self.codes[kept]
        present = np.zeros(len(self.names), dtype=bool)
        present[codes] = True
        renumbered = np.cumsum(present, dtype=np.int64) - 1
        if isinstance(self.names, np.ndarray):
            return Units(renumbered[codes], self.names[present])
        names = [name for name, has in zip(self.names, present, strict=True) if has]
        return Units(renumbered[codes], names)


def identify(column: Column) -> tuple[Units, npt.NDArray[np.bool_]]:
    """Read identifiers: the units, and which rows have one.

    A row whose identifier is missing, or is of no type that :func:`canonical_key` knows, has no
    unit (its code is -1).

    Examples
    --------
    >>> import numpy as np
    >>> from tukeyreg._tables import ArrayColumn
    >>> units, known = identify(ArrayColumn(np.array(["a", None, "a", 2.0], dtype=object)))
    >>> units.codes.tolist(), units.keys, known.tolist()
    ([0, -1, 0, 1], [b'sa', b'i2'], [True, False, True, True])
    """
    integers = integers_of(column)
    if integers is not None:
        names, codes = np.unique(integers, return_inverse=True)
        return Units(codes.astype(np.int64), names), np.ones(len(codes), dtype=bool)
    coded = column.coded()
    if coded is not None:
        of_row, distinct = coded
        return _units_of(of_row, [canonical_key(value) for value in distinct])
    present, values = column.moments() if column.kind == "datetime" else column.values()
    index, keys = _distinct_keys(values)
    of_row = np.full(len(column), _MISSING, dtype=np.int64)
    of_row[present] = index
    return _units_of(of_row, keys)


def _units_of(
    of_row: npt.NDArray[np.signedinteger], keys: list[bytes | None]
) -> tuple[Units, npt.NDArray[np.bool_]]:
    """Units by the key of every row, -1 for none; several keys in the list may be the same."""
    position: dict[bytes, int] = {}
    codes = np.array(
        [
            *(_MISSING if key is None else position.setdefault(key, len(position)) for key in keys),
            _MISSING,
        ],
        dtype=np.int64,
    )[of_row]
    return Units(codes, list(position)), codes != _MISSING


def integers_of(column: Column) -> npt.NDArray[np.int64] | None:
    """The identifiers, if all of them are integers of a machine's word by their dtype."""
    numbers = column.integers()
    return None if numbers is None else numbers.astype(np.int64, copy=False)


def _distinct_keys(
    values: list[Any] | npt.NDArray[Any],
) -> tuple[npt.NDArray[np.intp], list[bytes | None]]:
    """For each value the position of its key in a short list of keys."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        moments, index = np.unique(values, return_inverse=True)
        return index, [canonical_key(moment) for moment in moments]
    types = set(map(type, values))
    if types <= _PLAIN or types == {date}:
        index, distinct = _positions(values)
        return index, [canonical_key(value) for value in distinct]
    return _positions([canonical_key(value) for value in values])


def _positions(values: Iterable[Any]) -> tuple[npt.NDArray[np.intp], list[Any]]:
    values = list(values)
    position = {value: at for at, value in enumerate(dict.fromkeys(values))}
    index = np.fromiter(map(position.__getitem__, values), dtype=np.intp, count=len(values))
    return index, list(position)


def canonical_key(identifier: Any) -> bytes | None:
    """Spell an identifier in bytes, the same for equal identifiers of any library.

    ======================  =====================================================
    identifier              key
    ======================  =====================================================
    text                    ``s`` and its UTF-8
    bytes                   ``b`` and themselves
    integer, boolean        ``i`` and its decimal digits
    float, decimal          as an integer if it is whole, otherwise ``f`` and its
                            shortest spelling
    date, date and time     ``d`` and its ISO format in UTC; midnight is the date
    UUID                    as its text
    ======================  =====================================================

    Anything else, NaN and what cannot be spelled give None: no identifier.

    Examples
    --------
    >>> canonical_key("Müller"), canonical_key(12), canonical_key(12.0), canonical_key(0.5)
    (b'sM\\xc3\\xbcller', b'i12', b'i12', b'f0.5')
    """
    try:
        return _spell(identifier)
    except (ValueError, OverflowError):  # an integer of 5000 digits, a date out of the calendar
        return None


def _spell(value: Any) -> bytes | None:
    match value:
        case str():
            return b"s" + value.encode("utf-8", "surrogatepass")
        case bytes():
            return b"b" + value
        case np.datetime64():
            return None if np.isnat(value) else _spell_moment(_iso_format(value))
        case int() | np.integer() | np.bool_():
            return b"i%d" % int(value)
        case float() | np.floating():
            return _spell_float(float(value))
        case Decimal():
            return _spell_decimal(value)
        case datetime():
            return None if value != value else _spell_moment(_in_utc(value).isoformat())
        case date():
            return b"d" + value.isoformat().encode()
        case UUID():
            return b"s" + str(value).encode()
    return None


def _spell_float(value: float) -> bytes | None:
    if value != value:
        return None
    return b"i%d" % int(value) if value.is_integer() else b"f" + repr(value).encode()


def _spell_decimal(value: Decimal) -> bytes | None:
    if not value.is_finite() or abs(value.adjusted()) > 1000:  # 1E+999999999 fills the memory
        return None
    digits = f"{value:f}"
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    if "." in digits:
        return b"f" + digits.encode()
    return b"i%d" % int(digits)


def _in_utc(value: datetime) -> datetime:
    return value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)


def _iso_format(value: np.datetime64) -> str:
    unit = np.datetime_data(value.dtype)[0]
    if unit in {"Y", "M", "W"}:
        return str(value.astype("M8[D]"))
    return str(value.astype("M8[s]") if unit in {"h", "m"} else value)


def _spell_moment(iso: str) -> bytes:
    """Spell seconds as Python's isoformat does, and midnight as the date."""
    whole, _, fraction = iso.partition(".")
    fraction = fraction.rstrip("0")
    if fraction:
        return b"d" + f"{whole}.{fraction.ljust(6 if len(fraction) <= 6 else 9, '0')}".encode()
    return b"d" + whole.removesuffix("T00:00:00").encode()
