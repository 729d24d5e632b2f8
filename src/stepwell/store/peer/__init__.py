"""The host memory of other servers as a store to read from: a decode server uses it to get the pages of a prefill server."""
