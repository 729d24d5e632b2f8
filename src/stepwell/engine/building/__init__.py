"""From settings to a running engine: what they come to on this machine, and the two ways to put an engine together."""
