"""Benchmarks: every op against the best that is there without it, in alternation, as records."""
