"""`stepwell demo-cluster`: servers with roles behind a router and over one Mooncake cluster, and one of them is killed."""

from stepwell.cli.demo_cluster.command import COMMAND

__all__ = ["COMMAND"]
