"""Work in the background of the engine: copies between memories and store operations, on worker threads of every rank."""
