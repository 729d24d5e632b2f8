"""`stepwell doctor`: what of this machine is in a server's way, and what to change."""

from stepwell.cli.doctor.command import COMMAND as COMMAND
