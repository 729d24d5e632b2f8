"""What is cached here, told to routers as vLLM tells it: `blocks` translates, `publisher` carries, `zmq_socket` sends."""
