"""The figures and plots of docs/performance.md, written from the results in `bench/results/`."""
