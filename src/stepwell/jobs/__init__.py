"""Work that goes on beside the engine: copies between memories and store operations, on worker threads of every rank."""
