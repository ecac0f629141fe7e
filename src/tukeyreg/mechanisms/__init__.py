"""Pure functions: numbers and randomness in, a distribution or a point out."""
