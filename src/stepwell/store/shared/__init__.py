"""One log for several processes of a machine: one process owns it, the others call it over a local socket.

Each line imports only from lines below it:

opening    options -> an open store
store      the six verbs; which process owns the log, and what happens when it ends
server     the owner's side: answers the other processes
client     the other processes' side: calls the owner
settings   the options with which the owner opened the log
connection frames over a Unix socket in the directory, with deadlines, between processes of one user
memory     the memory that values travel in, and the checks on it
wire       the messages, as bytes
"""
