"""The figures of README.md and docs/performance.md, written from the results that are kept in `bench/results/`."""
