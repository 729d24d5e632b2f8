"""One log for several processes of a machine: one of them owns it, the others ask it over a local socket.

Each line imports only from lines below it:

opening    options -> an open store
store      the six verbs; who owns the log, and what happens when that ends
server     the owner's side: answers the others
client     the others' side: asks the owner
settings   what the owner has it open with
connection frames over a Unix socket in the directory, with deadlines, between processes of one user
memory     the memory that values travel in, and what is demanded of it
wire       what is said, as bytes
"""
