"""The decisions of a step: which requests are accepted, which compute in the next pass, how it runs, and what it results in."""
