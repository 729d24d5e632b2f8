"""Servers with roles behind a router and over one Mooncake cluster, and one of them is killed: `make demo-cluster`."""
