"""The figures and plots of README.md and docs/performance.md, written from the results in `bench/results/`."""
