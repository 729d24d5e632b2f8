"""Servers with roles behind a router and over one Mooncake cluster, one of which is killed: `make demo-cluster`."""
