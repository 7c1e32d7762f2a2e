"""The load generator: requests (`plan`), one exchange (`client`), a process (`worker`), statistics (`measure`)."""
