"""Cache events for routers in vLLM's format: `blocks` translates, `publisher` queues, `zmq_socket` sends."""
