"""Pages of another server's host memory as a store to read from: how a decode server gets what a prefill server computed."""
