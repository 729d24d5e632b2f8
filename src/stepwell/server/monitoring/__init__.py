"""What operators see of a server: metrics, logs, traces, load, and the last hour."""
